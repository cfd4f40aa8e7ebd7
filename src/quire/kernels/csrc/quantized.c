/* Products with interleaved packed weights, in whole numbers: dot products of 4 bytes, 4 rows of the weight at a time.
 *
 * x is rounded to 14 bits with a scale for each 32 columns, and split into two planes of bytes, x = scale * (64 * high
 * + low). What is computed for a row of x does not depend on the other rows, nor on how the work is divided.
 */
#include <stddef.h>

#include "linear.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define MOST 8159    /* the largest code: its high plane is 127 */
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
    int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(is_four(form) ? MAGIC_BITS : 0);
    for (int i = from; i < end; i++) {
        high = dot16(high, weight->codes + 4 * i, vld1q_s8(x + 16 * i));
        low = dot16(low, weight->codes + 4 * i, vld1q_s8(x + BLOCK + 16 * i));
    }
    low = vaddq_s32(low, vshlq_n_s32(high, 6));
    if (is_four(form))
        return vfmaq_f32(weight->shift[head], vreinterpretq_f32_s32(low), weight->scale[head]);
    return vmulq_f32(vcvtq_f32_s32(low), weight->scale[head]);
}

/* One row of x. */
INLINE float32x4_t times_block(int form, const Half *weight, const uint8_t *x, float32x4_t sum)
{
    const int8_t *codes = (const int8_t *)x;
    float32x4_t head = vld1q_f32((const float *)(x + 2 * BLOCK));
    int lows = is_four(form) || has_low(form);
    if (heads_of(form) == 1) {
        sum = lows ? vfmaq_laneq_f32(sum, weight->low[0], head, 1) : sum;
        return vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 2), head, 0);
    }
    sum = lows ? vfmaq_laneq_f32(sum, weight->low[0], head, 2) : sum;
    sum = lows ? vfmaq_laneq_f32(sum, weight->low[1], head, 3) : sum;
    sum = vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 1), head, 0);
    return vfmaq_laneq_f32(sum, dot(form, weight, 1, codes, 1, 2), head, 0);
}

/* times_block of four rows, `apart` bytes from each other, for codes of 4 bits and one head: the same operations, without the
 * copies between registers that a compiler adds. Constants come from memory because loads are free here and moves are not. */
INLINE void times_block_four(const Half *weight, const uint8_t *x, long apart, float32x4_t *sums)
{
    static const int32_t magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#define DOT(code, lane) /* high planes to v24.., low planes to v28.. */                                                          \
    "sdot v24.4s, v" #code ".16b, v8.4b[" #lane "]\n"                                                                            \
    "sdot v28.4s, v" #code ".16b, v9.4b[" #lane "]\n"                                                                            \
    "sdot v25.4s, v" #code ".16b, v10.4b[" #lane "]\n"                                                                           \
    "sdot v29.4s, v" #code ".16b, v11.4b[" #lane "]\n"                                                                           \
    "sdot v26.4s, v" #code ".16b, v12.4b[" #lane "]\n"                                                                           \
    "sdot v30.4s, v" #code ".16b, v13.4b[" #lane "]\n"                                                                           \
    "sdot v27.4s, v" #code ".16b, v14.4b[" #lane "]\n"                                                                           \
    "sdot v31.4s, v" #code ".16b, v15.4b[" #lane "]\n"
#define COLUMNS(high, low)                                                                                                       \
    "ldr q8, [%[x], #" #high "]\nldr q9, [%[x], #" #low "]\n"                                                                    \
    "ldr q10, [%[y], #" #high "]\nldr q11, [%[y], #" #low "]\n"                                                                  \
    "ldr q12, [%[z], #" #high "]\nldr q13, [%[z], #" #low "]\n"                                                                  \
    "ldr q14, [%[u], #" #high "]\nldr q15, [%[u], #" #low "]\n"
#define ROW(row, high, dots, to, head, shifted)                                                                                  \
    "shl v" #high ".4s, v" #high ".4s, #6\n"                                                                                     \
    "ldr q" #shifted ", [%[w], %[shift]]\n"                                                                                      \
    "ldr q" #head ", [%[" #row "], #64]\n"                                                                                       \
    "add v" #dots ".4s, v" #dots ".4s, v" #high ".4s\n"                                                                          \
    "fmla %[" #to "].4s, v17.4s, v" #head ".s[1]\n"                                                                              \
    "fmla v" #shifted ".4s, v" #dots ".4s, v16.4s\n"                                                                             \
    "fmla %[" #to "].4s, v" #shifted ".4s, v" #head ".s[0]\n"
    asm volatile("ldp q16, q17, [%[w]]\nldp q18, q19, [%[w], #32]\nldp q20, q21, [%[w], #64]\nldp q22, q23, [%[w], #96]\n"
                 "movi v24.4s, #0\nmovi v25.4s, #0\nmovi v26.4s, #0\nmovi v27.4s, #0\n"
                 "ldr q28, [%[magic]]\nldr q29, [%[magic]]\nldr q30, [%[magic]]\nldr q31, [%[magic]]\n"
                 COLUMNS(0, 32) DOT(16, 0) DOT(17, 1) DOT(18, 2) DOT(19, 3)
                 COLUMNS(16, 48) DOT(20, 0) DOT(21, 1) DOT(22, 2) DOT(23, 3)
                 "ldr q16, [%[w], %[scale]]\nldr q17, [%[w], %[low]]\n"
                 ROW(x, 24, 28, sx, 8, 9) ROW(y, 25, 29, sy, 10, 11) ROW(z, 26, 30, sz, 12, 13) ROW(u, 27, 31, su, 14, 15)
                 : [sx] "+w"(sums[0]), [sy] "+w"(sums[1]), [sz] "+w"(sums[2]), [su] "+w"(sums[3])
                 : [x] "r"(x), [y] "r"(x + apart), [z] "r"(x + 2 * apart), [u] "r"(x + 3 * apart), [w] "r"(weight),
                   [magic] "r"(magic), [scale] "i"(offsetof(Half, scale)), [shift] "i"(offsetof(Half, shift)),
                   [low] "i"(offsetof(Half, low))
                 : "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",
                   "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory");
#undef ROW
#undef COLUMNS
#undef DOT
}

/* One row of x times one group, straight from the weights. */
INLINE void times_one(int form, const uint8_t *weight, const uint8_t *x, long blocks, float *out)
{
    float32x4_t top = vdupq_n_f32(0), bottom = top;
    Half part;
    for (long b = 0; b < blocks; b++, weight += GROUP * block_bytes(form), x += ROUNDED_BYTES) {
        read_half(form, weight, 0, &part);
        top = times_block(form, &part, x, top);
        read_half(form, weight, 1, &part);
        bottom = times_block(form, &part, x, bottom);
    }
    vst1q_f32(out, top);
    vst1q_f32(out + 4, bottom);
}

/* Four rows of x, or one, times `num` blocks of 4 rows of the weight, which were made ready. */
INLINE void times_ready(int form, int count, const Half *ready, const uint8_t *x, long blocks, long num, float out[][GROUP])
{
    float32x4_t sums[4];
    long apart = blocks * ROUNDED_BYTES;
    for (int r = 0; r < count; r++)
        sums[r] = vld1q_f32(out[r]);
    for (long b = 0; b < num; b++, x += ROUNDED_BYTES)
        if (count == 4 && is_four(form) && heads_of(form) == 1)
            times_block_four(ready + b, x, apart, sums);
        else
            for (int r = 0; r < count; r++)
                sums[r] = times_block(form, ready + b, x + r * apart, sums[r]);
    for (int r = 0; r < count; r++)
        vst1q_f32(out[r], sums[r]);
}

INLINE void times_many(int form, long count, const uint8_t *weight, const uint8_t *x, long blocks, float out[][GROUP])
{
    Half ready[CHUNK];
    memset(out, 0, (size_t)count * sizeof *out);
    for (long start = 0; start < blocks; start += CHUNK) {
        long num = at_most(CHUNK, blocks - start);
        for (int half = 0; half < 2; half++) {
            const uint8_t *from = x + start * ROUNDED_BYTES;
            long r = 0;
            for (long b = 0; b < num; b++)
                read_half(form, weight + (start + b) * GROUP * block_bytes(form), half, ready + b);
            for (; r + 4 <= count; r += 4, from += 4 * blocks * ROUNDED_BYTES)
                times_ready(form, 4, ready, from, blocks, num, (float(*)[GROUP])(out[r] + 4 * half));
            for (; r < count; r++, from += blocks * ROUNDED_BYTES)
                times_ready(form, 1, ready, from, blocks, num, (float(*)[GROUP])(out[r] + 4 * half));
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
        if (count >= 4)
            times_many(form, count, weight, x, blocks, sums);
        else
            for (long r = 0; r < count; r++)
                times_one(form, weight, x + r * blocks * ROUNDED_BYTES, blocks, sums[r]);
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
