/* Packed weights in NEON registers: 32 columns of 4 rows. */
#ifndef QUIRE_GGUF_NEON_H
#define QUIRE_GGUF_NEON_H

#include "matrix.h"

#define AHEAD 1024 /* prefetch distance in bytes, for few rows of x */
#define FEW 16     /* maximum rows of x for which unpacking again is cheaper than unpacking to the L1 cache */

/* 1.5 * 2^23 as a float. Adding an integer below 2^22 to its bits adds that integer to the float. */
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

/* 32 columns of 4 rows of the weight. `shift` subtracts MAGIC again. A block with two heads has two entries; the codes are in the
 * first. */
typedef struct {
    int8x16_t codes[8];
    float32x4_t scale, shift, low;
} Half;

INLINE float32x4_t four_heads(int form, const uint8_t *at)
{
    if (has_halves(form))
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at)));
    if (form == E2M1) {
        float heads[4] = {half_power(at[0]), half_power(at[1]), half_power(at[2]), half_power(at[3])};
        return vld1q_f32(heads);
    }
    return vreinterpretq_f32_u8(vld1q_u8(at));
}

/* Read rows 4 * half.. of the group's block at `weight`. */
INLINE void read_half(int form, const uint8_t *weight, int half, Half *into)
{
    long each = heads_of(form), bytes = GROUP * head_bytes(form);
    const uint8_t *heads = weight + 4 * half * head_bytes(form), *codes = weight + each * (has_low(form) + 1) * bytes + 16 * half;
    for (int i = 0; i < each; i++) {
        into[i].scale = four_heads(form, heads + i * bytes);
        into[i].shift = vmulq_n_f32(into[i].scale, -MAGIC);
        if (has_low(form))
            into[i].low = four_heads(form, heads + (each + i) * bytes);
        else if (is_four(form))
            into[i].low = has_table(form) ? vdupq_n_f32(0) : vmulq_n_f32(into[i].scale, -8);
    }
    for (int i = 0; i < (is_four(form) ? 4 : 8); i++) {
        uint8x16_t at = vld1q_u8(codes + 4 * GROUP * i);
        if (is_four(form)) {
            into->codes[i] = vreinterpretq_s8_u8(vandq_u8(at, vdupq_n_u8(15)));
            into->codes[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(at, 4));
            for (int j = i; has_table(form) && j < 8; j += 4)
                into->codes[j] = vqtbl1q_s8(vld1q_s8(table_of(form)), vreinterpretq_u8_s8(into->codes[j]));
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

/* Store the outputs of a row for rows `first`.. of the weight, at most `width`, as far as they exist. */
INLINE void finish(const LinearJob *job, const Matrix *part, float *sums, long at, long row, long first, long width)
{
    width = at_most(width, part->rows - first);
    if (job->bias)
        for (long i = 0; i < width; i++)
            sums[i] += job->bias[at + first + i];
    narrow(sums, job->out, (int)job->out_bf16, row * job->out_stride + at + first, width);
}

/* `quire_dot_task` for few rows of x, for formats with one head per block. */
void quire_dot_few(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long group,
                   long group_end);

#endif
