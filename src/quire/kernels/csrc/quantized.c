/* Products with interleaved packed weights, in whole numbers: dot products of 4 bytes, 4 rows of the weight at a time.
 *
 * x is rounded to 14 bits with a scale for each 32 columns, and split into two planes of bytes, x = scale * (64 * high
 * + low). What is computed for a row of x does not depend on the other rows, nor on how the work is divided.
 */
#include "linear.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define MOST 8159    /* the largest code: its high plane is 127 */
#define ROWS 4       /* rows of x that share one reading of the weights */
#define CHUNK 64     /* blocks of a weight that are made ready at a time */
#define TASK_ROWS 64 /* rows of x in one task, at most */

/* 1.5 * 2^23 as a float. A whole number below 2^22 added to its bits is that number added to the float. */
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

int quire_can_dot(void) { return 1; }

void quire_round_row(const float *x, long blocks, uint8_t *into)
{
    for (long b = 0; b < blocks; b++, x += BLOCK, into += ROUNDED_BYTES) {
        float32x4_t most = vdupq_n_f32(0), bad = vdupq_n_f32(0); /* bad: 0, or NaN if x is not finite */
        int32x4_t sums[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
        for (int i = 0; i < BLOCK; i += 4) {
            float32x4_t at = vld1q_f32(x + i);
            most = vmaxnmq_f32(most, vabsq_f32(at));
            bad = vfmaq_n_f32(bad, at, 0);
        }
        float top = vmaxvq_f32(most), inverse = top > 1e-30f ? MOST / top : 0;
        for (int i = 0; i < BLOCK; i += 16) {
            int16x8_t code[2], high[2], low[2];
            for (int j = 0; j < 2; j++) {
                int32x4_t one = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 8 * j), inverse));
                int32x4_t two = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 8 * j + 4), inverse));
                code[j] = vcombine_s16(vqmovn_s32(one), vqmovn_s32(two));
                high[j] = vrshrq_n_s16(code[j], 6);
                low[j] = vsubq_s16(code[j], vshlq_n_s16(high[j], 6));
                sums[i / 16] = vpadalq_s16(sums[i / 16], code[j]);
            }
            vst1q_s8((int8_t *)into + i, vcombine_s8(vmovn_s16(high[0]), vmovn_s16(high[1])));
            vst1q_s8((int8_t *)into + BLOCK + i, vcombine_s8(vmovn_s16(low[0]), vmovn_s16(low[1])));
        }
        float scale = top / MOST + vaddvq_f32(bad);
        int32_t left = vaddvq_s32(sums[0]), right = vaddvq_s32(sums[1]);
        float head[4] = {scale, scale * (float)(left + right), scale * (float)left, scale * (float)right};
        memcpy(into + 2 * BLOCK, head, sizeof head);
    }
}

/* 32 columns of 4 rows of the weight. `shift` takes the MAGIC away again. */
typedef struct {
    int8x16_t codes[8];
    float32x4_t scale[2], shift[2], low[2];
} Half;

INLINE float32x4_t four_heads(int form, const uint8_t *at)
{
    if (has_halves(form))
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
    return vreinterpretq_f32_u8(vld1q_u8(at));
}

/* Rows 4 * half.. of the group's block at `weight`. */
INLINE void read_half(int form, const uint8_t *weight, int half, Half *into)
{
    long each = heads_of(form), bytes = GROUP * head_bytes(form);
    const uint8_t *heads = weight + 4 * half * head_bytes(form), *codes = weight + each * (has_low(form) + 1) * bytes + 16 * half;
    for (int i = 0; i < each; i++) {
        into->scale[i] = four_heads(form, heads + i * bytes);
        into->shift[i] = vmulq_n_f32(into->scale[i], -MAGIC);
        if (has_low(form))
            into->low[i] = four_heads(form, heads + (each + i) * bytes);
        else if (is_four(form))
            into->low[i] = vmulq_n_f32(into->scale[i], -8);
    }
    for (int i = 0; i < (is_four(form) ? 4 : 8); i++) {
        uint8x16_t at = vld1q_u8(codes + 4 * GROUP * i);
        if (is_four(form)) {
            into->codes[i] = vreinterpretq_s8_u8(vandq_u8(at, vdupq_n_u8(15)));
            into->codes[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(at, 4));
        } else
            into->codes[i] = vreinterpretq_s8_u8(at);
    }
}

INLINE int32x4_t dot16(int32x4_t sum, const int8x16_t *codes, int8x16_t x)
{
    sum = vdotq_laneq_s32(sum, codes[0], x, 0);
    sum = vdotq_laneq_s32(sum, codes[1], x, 1);
    sum = vdotq_laneq_s32(sum, codes[2], x, 2);
    return vdotq_laneq_s32(sum, codes[3], x, 3);
}

/* Columns 16 * from.. 16 * end of the block, without the scale of x. Sums of codes of 4 bits stay below 2^22. */
INLINE float32x4_t dot(int form, const Half *weight, int head, const int8_t *x, int from, int end)
{
    int32x4_t sum = vdupq_n_s32(is_four(form) ? MAGIC_BITS >> 6 : 0);
    for (int i = from; i < end; i++)
        sum = dot16(sum, weight->codes + 4 * i, vld1q_s8(x + 16 * i));
    sum = vshlq_n_s32(sum, 6);
    for (int i = from; i < end; i++)
        sum = dot16(sum, weight->codes + 4 * i, vld1q_s8(x + BLOCK + 16 * i));
    if (is_four(form))
        return vfmaq_f32(weight->shift[head], vreinterpretq_f32_s32(sum), weight->scale[head]);
    return vmulq_f32(vcvtq_f32_s32(sum), weight->scale[head]);
}

INLINE float32x4_t times_block(int form, const Half *weight, const uint8_t *x, float32x4_t sum)
{
    const int8_t *codes = (const int8_t *)x;
    float32x4_t head = vld1q_f32((const float *)(x + 2 * BLOCK));
    int lows = is_four(form) || has_low(form);
    if (heads_of(form) == 1) {
        sum = vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 2), head, 0);
        return lows ? vfmaq_laneq_f32(sum, weight->low[0], head, 1) : sum;
    }
    sum = vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 1), head, 0);
    sum = lows ? vfmaq_laneq_f32(sum, weight->low[0], head, 2) : sum;
    sum = vfmaq_laneq_f32(sum, dot(form, weight, 1, codes, 1, 2), head, 0);
    return lows ? vfmaq_laneq_f32(sum, weight->low[1], head, 3) : sum;
}

/* A few rows of x times one group, straight from the weights. */
INLINE void times_group(int form, int count, const uint8_t *weight, const uint8_t *x, long blocks, float out[][GROUP])
{
    float32x4_t sums[2][ROWS];
    Half part;
    for (int r = 0; r < count; r++)
        sums[0][r] = sums[1][r] = vdupq_n_f32(0);
    for (long b = 0; b < blocks; b++, weight += GROUP * block_bytes(form))
        for (int half = 0; half < 2; half++) {
            read_half(form, weight, half, &part);
            for (int r = 0; r < count; r++)
                sums[half][r] = times_block(form, &part, x + (r * blocks + b) * ROUNDED_BYTES, sums[half][r]);
        }
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
            vst1q_f32(out[r] + 4 * half, sums[half][r]);
}

/* Rows of x times 4 rows of the weight, which were made ready. */
INLINE void times_ready(int form, int count, const Half *ready, const uint8_t *x, long blocks, long num, float *sums)
{
    float32x4_t sum[ROWS];
    for (int r = 0; r < count; r++)
        sum[r] = vld1q_f32(sums + r * GROUP);
    for (long b = 0; b < num; b++)
        for (int r = 0; r < count; r++)
            sum[r] = times_block(form, ready + b, x + (r * blocks + b) * ROUNDED_BYTES, sum[r]);
    for (int r = 0; r < count; r++)
        vst1q_f32(sums + r * GROUP, sum[r]);
}

INLINE void times_many(int form, long count, const uint8_t *weight, const uint8_t *x, long blocks, float out[][GROUP])
{
    Half ready[CHUNK];
    memset(out, 0, (size_t)count * sizeof *out);
    for (long start = 0; start < blocks; start += CHUNK) {
        long num = blocks - start < CHUNK ? blocks - start : CHUNK;
        for (int half = 0; half < 2; half++) {
            for (long b = 0; b < num; b++)
                read_half(form, weight + (start + b) * GROUP * block_bytes(form), half, ready + b);
            for (long r = 0; r < count; r += ROWS) {
                const uint8_t *from = x + (r * blocks + start) * ROUNDED_BYTES;
                if (count - r >= ROWS)
                    times_ready(form, ROWS, ready, from, blocks, num, out[r] + 4 * half);
                else
                    for (long i = r; i < count; i++, from += blocks * ROUNDED_BYTES)
                        times_ready(form, 1, ready, from, blocks, num, out[i] + 4 * half);
            }
        }
    }
}

INLINE void run_task(int form, const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end,
                     long group, long group_end)
{
    float sums[TASK_ROWS][GROUP];
    long blocks = part->columns / BLOCK, count = row_end - row;
    x += row * blocks * ROUNDED_BYTES;
    for (; group < group_end; group++) {
        const uint8_t *weight = (const uint8_t *)part->data + group * blocks * GROUP * block_bytes(form);
        long first = group * GROUP, width = part->rows - first < GROUP ? part->rows - first : GROUP;
        switch (count) {
        case 1: times_group(form, 1, weight, x, blocks, sums); break;
        case 2: times_group(form, 2, weight, x, blocks, sums); break;
        case 4: times_group(form, 4, weight, x, blocks, sums); break;
        default: times_many(form, count, weight, x, blocks, sums);
        }
        for (long r = 0; r < count; r++) {
            if (job->bias)
                for (long i = 0; i < width; i++)
                    sums[r][i] += job->bias[at + first + i];
            narrow(sums[r], job->out, (int)job->out_bf16, (row + r) * job->out_stride + at + first, width);
        }
    }
}

void quire_dot_task(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long group,
                    long group_end)
{
    switch (part->form) {
    case FOUR_H: run_task(FOUR_H, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_H: run_task(FOUR_LOW_H, job, part, x, at, row, row_end, group, group_end); break;
    case EIGHT_H: run_task(EIGHT_H, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_F: run_task(FOUR_LOW_F, job, part, x, at, row, row_end, group, group_end); break;
    case EIGHT_LOW_F: run_task(EIGHT_LOW_F, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_F_16: run_task(FOUR_LOW_F_16, job, part, x, at, row, row_end, group, group_end); break;
    default: run_task(EIGHT_F_16, job, part, x, at, row, row_end, group, group_end);
    }
}

#else

int quire_can_dot(void) { return 0; }

#endif
