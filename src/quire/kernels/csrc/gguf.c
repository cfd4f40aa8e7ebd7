/* Integer GEMM with interleaved packed weights: dot products of 4 bytes, 4 rows of the weight at a time.
 *
 * x is quantized to 14 bits with a scale per 32 columns and split into two planes of bytes, x = scale * (64 * high + low).
 * The result of a row of x depends neither on the other rows nor on the division of the work.
 */
#include <stddef.h>

#include "matrix.h"

#ifdef DOT_NEON

#include "gguf_neon.h"

#define MOST 8159     /* largest code: its high plane is 127 */
#define HALVES 16     /* maximum half groups (4 rows of the weight each) that are unpacked at a time, to stay in the L1 cache; */
#define CHUNK 24      /* maximum blocks of each of them. With fewer than MANY rows of x, half as many half groups. */
#define MANY 32

void quire_round_row(const float *x, long blocks, uint8_t *into)
{
    static const vf magic = SAME(MAGIC);
    for (long b = 0; b < blocks; b++, x += BLOCK, into += ROUNDED_BYTES) {
        float32x4_t most[2] = {vabsq_f32(vld1q_f32(x)), vabsq_f32(vld1q_f32(x + 4))};
        for (int i = 8; i < BLOCK; i += 4)
            most[i / 4 % 2] = vmaxq_f32(most[i / 4 % 2], vabsq_f32(vld1q_f32(x + i)));
        float top = vmaxvq_f32(vmaxq_f32(most[0], most[1])), inverse = top > 1e-30f ? MOST / top : 0;
        float scale = top * (1.0f / MOST) + top * 0; /* NaN if x is not finite */
        int32x4_t sums[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
        for (int i = 0; i < BLOCK; i += 16) {
            int16x8_t code[2], high[2], low[2];
            for (int j = 0; j < 2; j++) { /* the addition rounds: the code is in the low 16 bits */
                float32x4_t one = vfmaq_n_f32((float32x4_t)fresh(&magic), vld1q_f32(x + i + 8 * j), inverse);
                float32x4_t two = vfmaq_n_f32((float32x4_t)fresh(&magic), vld1q_f32(x + i + 8 * j + 4), inverse);
                code[j] = vuzp1q_s16(vreinterpretq_s16_f32(one), vreinterpretq_s16_f32(two));
                high[j] = vrshrq_n_s16(code[j], 6);
                low[j] = vsubq_s16(code[j], vshlq_n_s16(high[j], 6));
                sums[i / 16] = vpadalq_s16(sums[i / 16], code[j]);
            }
            vst1q_s8((int8_t *)into + i, vuzp1q_s8(vreinterpretq_s8_s16(high[0]), vreinterpretq_s8_s16(high[1])));
            vst1q_s8((int8_t *)into + BLOCK + i, vuzp1q_s8(vreinterpretq_s8_s16(low[0]), vreinterpretq_s8_s16(low[1])));
        }
        int32_t left = vaddvq_s32(sums[0]), right = vaddvq_s32(sums[1]);
        float head[4] = {scale, scale * (float)(left + right), scale * (float)left, scale * (float)right};
        memcpy(into + 2 * BLOCK, head, sizeof head);
    }
}

/* Products of 4 rows of the weight with x over columns 16 * from.. 16 * end of a block, without the scale of x. Sums of small
 * codes stay below 2^22. */
INLINE float32x4_t dot(int form, const Half *weight, int head, const int8_t *x, int from, int end)
{
    int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(is_small(form) ? MAGIC_BITS : 0);
    for (int i = from; i < end; i++) {
        high = dot16(high, weight->codes + 4 * i, vld1q_s8(x + 16 * i));
        low = dot16(low, weight->codes + 4 * i, vld1q_s8(x + BLOCK + 16 * i));
    }
    low = vaddq_s32(low, vshlq_n_s32(high, 6));
    if (is_small(form))
        return vfmaq_f32(weight[head].shift, vreinterpretq_f32_s32(low), weight[head].scale);
    return vmulq_f32(vcvtq_f32_s32(low), weight[head].scale);
}

/* Add the products of a block of 4 rows of the weight with one row of x to `sum`. */
INLINE float32x4_t times_block(int form, const Half *weight, const uint8_t *x, float32x4_t sum)
{
    const int8_t *codes = (const int8_t *)x;
    float32x4_t head = vld1q_f32((const float *)(x + 2 * BLOCK));
    int lows = is_four(form) || has_low(form);
    if (heads_of(form) == 1) {
        sum = lows ? vfmaq_laneq_f32(sum, weight[0].low, head, 1) : sum;
        return vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 2), head, 0);
    }
    sum = lows ? vfmaq_laneq_f32(sum, weight[0].low, head, 2) : sum;
    sum = lows ? vfmaq_laneq_f32(sum, weight[1].low, head, 3) : sum;
    sum = vfmaq_laneq_f32(sum, dot(form, weight, 0, codes, 0, 1), head, 0);
    return vfmaq_laneq_f32(sum, dot(form, weight, 1, codes, 1, 2), head, 0);
}

/* times_block of 4 or 8 rows with a stride of `apart` bytes and `num` blocks, for small codes and one head. The operations are the
 * same, in an order that keeps both pipelines busy. The high plane is summed first and shifted in place, then the low plane is
 * added; the sum starts with MAGIC. Switching from float operations to dot products costs a cycle, so they are separated. Loads
 * are free if they are spread, even of constants. The prefetch after the last block loads that block again.
 *
 * v0..7: sums, v8..15: integer sums of a block, v16..23: codes, v24..31: x. */
#define DOT4(code, lane)                                                                                                         \
    "sdot v8.4s, v" #code ".16b, v24.4b[" #lane "]\nsdot v9.4s, v" #code ".16b, v25.4b[" #lane "]\n"                             \
    "sdot v10.4s, v" #code ".16b, v26.4b[" #lane "]\nsdot v11.4s, v" #code ".16b, v27.4b[" #lane "]\n"
#define DOT8(code, lane)                                                                                                         \
    "sdot v12.4s, v" #code ".16b, v28.4b[" #lane "]\nsdot v13.4s, v" #code ".16b, v29.4b[" #lane "]\n"                           \
    "sdot v14.4s, v" #code ".16b, v30.4b[" #lane "]\nsdot v15.4s, v" #code ".16b, v31.4b[" #lane "]\n"
/* 16 columns of rows 0..3 or 4..7, interleaved with other work. */
#define LEFT4(p, q, r, s) DOT4(16, 0) p DOT4(17, 1) q DOT4(18, 2) r DOT4(19, 3) s
#define LEFT8(p, q, r, s) DOT8(16, 0) p DOT8(17, 1) q DOT8(18, 2) r DOT8(19, 3) s
#define RIGHT4(p, q, r, s) DOT4(20, 0) p DOT4(21, 1) q DOT4(22, 2) r DOT4(23, 3) s
#define RIGHT8(p, q, r, s) DOT8(20, 0) p DOT8(21, 1) q DOT8(22, 2) r DOT8(23, 3) s
#define LOAD(to, from, at) "ldr q" #to ", [%[" #from "], " #at "]\n"
#define X4(at) LOAD(24, a, at), LOAD(25, b, at), LOAD(26, c, at), LOAD(27, d, at)
#define X8(at) LOAD(28, e, at), LOAD(29, f, at), LOAD(30, g, at), LOAD(31, h, at)
#define ALL(p, q, r, s) p q r s
#define EACH(what, ...) what(__VA_ARGS__)
#define LEFT_CODES "ldp q16, q17, [%[w]]\nldp q18, q19, [%[w], 32]\n"
#define RIGHT_CODES "ldp q20, q21, [%[w], 64]\nldp q22, q23, [%[w], 96]\n"
#define MAGIC4 LOAD(8, m, 0) LOAD(9, m, 0) LOAD(10, m, 0) LOAD(11, m, 0)
#define MAGIC8 LOAD(12, m, 0) LOAD(13, m, 0) LOAD(14, m, 0) LOAD(15, m, 0)
#define SHL(sum) "shl v" #sum ".4s, v" #sum ".4s, 6\n"
#define STEP(by, row) "add %[" #row "], %[" #row "], %[" #by "]\n"
#define STOP(by) "csel %[" #by "], %[" #by "], xzr, ne\n" /* do not advance past the last block */
#define HEADS LOAD(20, w, %[scale]) LOAD(21, w, %[low])
#define SHIFT(to) LOAD(to, w, %[shift])
#define SCALE(to, sum) "fmla v" #to ".4s, v" #sum ".4s, v20.4s\n"
#define LOW(row, x) "fmla v" #row ".4s, v21.4s, v" #x ".s[1]\n"
#define ADD(row, from, x) "fmla v" #row ".4s, v" #from ".4s, v" #x ".s[0]\n"
#define FINISH4                                                                                                                  \
    SCALE(22, 8) SCALE(23, 9) SHIFT(8) SHIFT(9) SCALE(8, 10) SCALE(9, 11)
#define OUT4(op) op " q0, [%[out]]\n" op " q1, [%[out], %[wide]]\n" op " q2, [%[out], %[wide] * 2]\n" op " q3, [%[out], %[wide] * 3]\n"
#define OUT8(op)                                                                                                                 \
    op " q4, [%[out], %[wide] * 4]\n" op " q5, [%[out], %[wide] * 5]\n" op " q6, [%[out], %[wide] * 6]\n"                        \
    op " q7, [%[out], %[wide] * 7]\n"
#define CONSTANTS                                                                                                                \
    [m] "r"(magic), [out] "r"(out), [scale] "i"(offsetof(Half, scale)), [shift] "i"(offsetof(Half, shift)),                      \
        [low] "i"(offsetof(Half, low)), [wide] "i"(16 * HALVES)
#define USED                                                                                                                     \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18",   \
        "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory", "cc"

static const int32_t magic[4] = {MAGIC_BITS >> 6, MAGIC_BITS >> 6, MAGIC_BITS >> 6, MAGIC_BITS >> 6};

static void times_blocks_four(const Half *weight, const uint8_t *x, long apart, long num, float out[][4 * HALVES])
{
    const uint8_t *a = x, *b = a + apart, *c = b + apart, *d = c + apart;
    long size = ROUNDED_BYTES, half = sizeof(Half);
    asm volatile(OUT4("ldr") LEFT_CODES MAGIC4 EACH(ALL, X4(0))
                 "1:\n" EACH(LEFT4, "", "", RIGHT_CODES "subs %[n], %[n], 1\n", EACH(ALL, X4(16)))
                 EACH(RIGHT4, "", STOP(size), "", EACH(ALL, X4(48)) SHL(8) SHL(9) SHL(10) SHL(11))
                 EACH(RIGHT4, "", "", "", EACH(ALL, X4(32)) HEADS SHIFT(22) SHIFT(23))
                 EACH(LEFT4, "", "", "", EACH(ALL, X4(64)))
                 STEP(size, a) STEP(size, b) STEP(size, c) STEP(size, d)
                 FINISH4 STOP(half) STEP(half, w) LEFT_CODES LOW(0, 24) LOW(1, 25) LOW(2, 26) LOW(3, 27)
                 ADD(0, 22, 24) ADD(1, 23, 25) ADD(2, 8, 26) ADD(3, 9, 27) MAGIC4 EACH(ALL, X4(0)) "b.ne 1b\n"
                 OUT4("str")
                 : [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d), [w] "+r"(weight), [n] "+r"(num), [size] "+r"(size),
                   [half] "+r"(half)
                 : CONSTANTS
                 : USED);
}

static void times_blocks_eight(const Half *weight, const uint8_t *x, long apart, long num, float out[][4 * HALVES])
{
    const uint8_t *a = x, *b = a + apart, *c = b + apart, *d = c + apart;
    const uint8_t *e = d + apart, *f = e + apart, *g = f + apart, *h = g + apart;
    long size = ROUNDED_BYTES, half = sizeof(Half);
    asm volatile(OUT4("ldr") OUT8("ldr")
                 LEFT_CODES MAGIC4 MAGIC8 EACH(ALL, X4(0)) EACH(ALL, X8(0))
                 "1:\n" LEFT4("", RIGHT_CODES, "", "subs %[n], %[n], 1\n") EACH(LEFT8, X4(16))
                 EACH(RIGHT4, X8(16)) EACH(RIGHT8, SHL(8) LOAD(24, a, 48), SHL(9) LOAD(25, b, 48), SHL(10) LOAD(26, c, 48),
                                           SHL(11) LOAD(27, d, 48) STOP(size))
                 RIGHT4(SHL(12) LOAD(28, e, 48), SHL(13) LOAD(29, f, 48), SHL(14) LOAD(30, g, 48), SHL(15) LOAD(31, h, 48))
                 EACH(RIGHT8, X4(32))
                 LEFT4(LOAD(28, e, 32) SHIFT(22), LOAD(29, f, 32) SHIFT(23), LOAD(30, g, 32), LOAD(31, h, 32) HEADS)
                 LEFT8(LOAD(24, a, 64) STEP(size, a), LOAD(25, b, 64) STEP(size, b), LOAD(26, c, 64) STEP(size, c),
                       LOAD(27, d, 64) STEP(size, d))
                 FINISH4 EACH(ALL, X8(64)) LOW(0, 24) LOW(1, 25) LOW(2, 26) LOW(3, 27)
                 ADD(0, 22, 24) ADD(1, 23, 25) SHIFT(22) SHIFT(23) ADD(2, 8, 26) ADD(3, 9, 27) MAGIC4 EACH(ALL, X4(0))
                 SCALE(22, 12) SCALE(23, 13) SHIFT(12) SHIFT(13) SCALE(12, 14) SCALE(13, 15)
                 STOP(half) STEP(half, w) LEFT_CODES LOW(4, 28) LOW(5, 29) LOW(6, 30) LOW(7, 31)
                 ADD(4, 22, 28) ADD(5, 23, 29) ADD(6, 12, 30) ADD(7, 13, 31)
                 STEP(size, e) STEP(size, f) STEP(size, g) STEP(size, h) MAGIC8 EACH(ALL, X8(0)) "b.ne 1b\n"
                 OUT4("str") OUT8("str")
                 : [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d), [e] "+r"(e), [f] "+r"(f), [g] "+r"(g), [h] "+r"(h),
                   [w] "+r"(weight), [n] "+r"(num), [size] "+r"(size), [half] "+r"(half)
                 : CONSTANTS
                 : USED);
}

/* One row of x times one group, directly from the packed weights. */
INLINE void times_one(int form, const uint8_t *weight, const uint8_t *x, long blocks, float *out)
{
    float32x4_t top = vdupq_n_f32(0), bottom = top;
    Half part[2];
    for (long b = 0; b < blocks; b++, weight += GROUP * block_bytes(form), x += ROUNDED_BYTES) {
        for (int i = 0; i < GROUP * block_bytes(form); i += 64)
            __builtin_prefetch(weight + AHEAD + i);
        read_half(form, weight, 0, part);
        top = times_block(form, part, x, top);
        read_half(form, weight, 1, part);
        bottom = times_block(form, part, x, bottom);
    }
    vst1q_f32(out, top);
    vst1q_f32(out + 4, bottom);
}

/* Eight, four or one rows of x times `num` unpacked blocks of 4 rows of the weight. */
INLINE void times_ready(int form, int count, const Half *ready, const uint8_t *x, long apart, long num, float out[][4 * HALVES])
{
    if (count > 1 && is_small(form) && heads_of(form) == 1) {
        if (count == 8)
            times_blocks_eight(ready, x, apart, num, out);
        else
            times_blocks_four(ready, x, apart, num, out);
        return;
    }
    for (int first = 0; first < count; first += 4) {
        float32x4_t sums[4];
        int some = (int)at_most(count - first, 4);
        const uint8_t *from = x + first * apart;
        for (int r = 0; r < some; r++)
            sums[r] = vld1q_f32(out[first + r]);
        for (long b = 0; b < num; b++, from += ROUNDED_BYTES)
            for (int r = 0; r < some; r++)
                sums[r] = times_block(form, ready + b * heads_of(form), from + r * apart, sums[r]);
        for (int r = 0; r < some; r++)
            vst1q_f32(out[first + r], sums[r]);
    }
}

/* `count` rows of x times all unpacked blocks. */
INLINE long times_rows(int form, int step, long r, long count, Half ready[][CHUNK], long halves, const uint8_t *x, long apart,
                       long num, float out[][4 * HALVES])
{
    for (; r + step <= count; r += step)
        for (long h = 0; h < halves; h++)
            times_ready(form, step, ready[h], x + r * apart, apart, num, (float(*)[4 * HALVES])(out[r] + 4 * h));
    return r;
}

/* Rows of x times `halves` half groups. The unpacked weights and a few rows of x stay in the L1 cache. */
INLINE void times_many(int form, long count, const uint8_t *weight, long halves, const uint8_t *x, long blocks,
                       float out[][4 * HALVES])
{
    Half ready[HALVES][CHUNK];
    long apart = blocks * ROUNDED_BYTES, bytes = GROUP * block_bytes(form), each = heads_of(form);
    memset(out, 0, (size_t)count * sizeof *out);
    for (long start = 0; start < blocks; start += CHUNK / each) {
        long num = at_most(CHUNK / each, blocks - start), r = 0;
        const uint8_t *from = x + start * ROUNDED_BYTES;
        for (long h = 0; h < halves; h++)
            for (long b = 0; b < num; b++)
                read_half(form, weight + (h / 2 * blocks + start + b) * bytes, h % 2, &ready[h][b * each]);
        r = times_rows(form, 8, r, count, ready, halves, from, apart, num, out);
        r = times_rows(form, 4, r, count, ready, halves, from, apart, num, out);
        times_rows(form, 1, r, count, ready, halves, from, apart, num, out);
    }
}

/* Rows of x times groups of the weight, one row at a time. */
INLINE void run_single(int form, const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end,
                    long group, long group_end)
{
    long blocks = part->columns / BLOCK, bytes = blocks * GROUP * block_bytes(form);
    for (; group < group_end; group++)
        for (long r = row; r < row_end; r++) {
            float sums[GROUP];
            times_one(form, (const uint8_t *)part->data + group * bytes, x + r * blocks * ROUNDED_BYTES, blocks, sums);
            finish(job, part, sums, at, r, group * GROUP, GROUP);
        }
}

INLINE void run_many(int form, const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end,
                     long group, long group_end)
{
    long blocks = part->columns / BLOCK, count = row_end - row, bytes = blocks * GROUP * block_bytes(form);
    long together = is_four(form) && count >= MANY ? HALVES / 2 : HALVES / 4;
    float sums[DOT_ROWS][4 * HALVES];
    for (long groups; group < group_end; group += groups) {
        groups = at_most(together, group_end - group);
        times_many(form, count, (const uint8_t *)part->data + group * bytes, 2 * groups, x + row * blocks * ROUNDED_BYTES, blocks,
                   sums);
        for (long r = 0; r < count; r++)
            finish(job, part, sums[r], at, row + r, group * GROUP, groups * GROUP);
    }
}

static __attribute__((noinline)) void dot_many(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row,
                                               long row_end, long group, long group_end)
{
    switch (part->form) {
    case FOUR_H: run_many(FOUR_H, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_H: run_many(FOUR_LOW_H, job, part, x, at, row, row_end, group, group_end); break;
    case EIGHT_H: run_many(EIGHT_H, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_F: run_many(FOUR_LOW_F, job, part, x, at, row, row_end, group, group_end); break;
    case EIGHT_LOW_F: run_many(EIGHT_LOW_F, job, part, x, at, row, row_end, group, group_end); break;
    case FOUR_LOW_F_16: run_many(FOUR_LOW_F_16, job, part, x, at, row, row_end, group, group_end); break;
    case E2M1: run_many(E2M1, job, part, x, at, row, row_end, group, group_end); break;
    case IQ2_F_16: run_many(IQ2_F_16, job, part, x, at, row, row_end, group, group_end); break;
    case IQ3_F: run_many(IQ3_F, job, part, x, at, row, row_end, group, group_end); break;
    case IQ4_F: run_many(IQ4_F, job, part, x, at, row, row_end, group, group_end); break;
    case E2M1_F_16: run_many(E2M1_F_16, job, part, x, at, row, row_end, group, group_end); break;
    default: run_many(EIGHT_F_16, job, part, x, at, row, row_end, group, group_end);
    }
}

void quire_dot_task(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long group,
                    long group_end)
{
    if (heads_of((int)part->form) == 1 && row_end - row < FEW)
        quire_dot_few(job, part, x, at, row, row_end, group, group_end);
    else if (row_end - row >= 4)
        dot_many(job, part, x, at, row, row_end, group, group_end);
    else if (part->form == FOUR_LOW_F_16)
        run_single(FOUR_LOW_F_16, job, part, x, at, row, row_end, group, group_end);
    else if (part->form == IQ2_F_16)
        run_single(IQ2_F_16, job, part, x, at, row, row_end, group, group_end);
    else if (part->form == E2M1_F_16)
        run_single(E2M1_F_16, job, part, x, at, row, row_end, group, group_end);
    else
        run_single(EIGHT_F_16, job, part, x, at, row, row_end, group, group_end);
}

#endif
