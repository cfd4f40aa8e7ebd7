/* Inner loops of attention: scores of a tile of keys, softmax weights, and weighted sums of values.
 *
 * Scores are in units of log2: q is pre-multiplied by the factor. */
#ifndef QUIRE_ATTENTION_TILES_H
#define QUIRE_ATTENTION_TILES_H

#include <math.h>

#define ALL_LANES
#include "simd.h"

#define TILE 128            /* keys per tile */
#define STEP (SIDE * LANES) /* scores per iteration of the softmax */
/* Rows of the inner loops: 4 sums per row and the operands fit in 32 or 16 registers. */
#if LANES == 16
#define ROWS 6
#elif defined(HAS_NEON)
#define ROWS 4
#define MIXED_KEYS TILE
#else
#define ROWS 3
#endif
#ifndef MIXED_KEYS
#define MIXED_KEYS 64 /* values that are added for all rows before the next values, so that they stay in the L1 cache */
#endif

/* Scores of several rows with 4 keys at offset `from` of the pointers. */
INLINE void score4(int rows, const float *q, const float *const *keys, long from, long dim, float *out)
{
    vf sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++)
            sums[r][k] = load(q + r * dim) * load(keys[k] + from);
    for (long d = LANES; d < dim; d += LANES) {
        vf query[ROWS];
        for (int r = 0; r < rows; r++)
            query[r] = load(q + r * dim + d);
        for (int k = 0; k < 4; k++) {
            vf key = held(load(keys[k] + from + d));
            for (int r = 0; r < rows; r++)
                sums[r][k] = fused(query[r], key, sums[r][k]);
        }
    }
    for (int r = 0; r < rows; r++)
        lanes_sum4(sums[r], out + r * TILE);
}

INLINE void mix_key(int rows, int vectors, const float *values, const factors *weights, int at, vf (*sums)[4])
{
    for (int i = 0; i < vectors; i++) {
        vf value = held(load(values + i * LANES));
        for (int r = 0; r < rows; r++)
            sums[r][i] = fused_by(value, weights[r], at, sums[r][i]);
    }
}

/* Weighted sums of the values of keys [first, end) of a tile for several rows, `vectors` vectors from column `d` on. With `more`,
 * they are added to the output. */
INLINE void mix(int rows, int vectors, int more, const float *weights, const float *const *values, long first, long end, long d,
                long dim, float *out)
{
    vf sums[ROWS][4] = {{{0}}};
    for (int r = 0; more && r < rows; r++)
        for (int i = 0; i < vectors; i++)
            sums[r][i] = load(out + r * dim + i * LANES);
    long k = first;
    for (; k + FACTORS <= end; k += FACTORS) {
        factors weight[ROWS];
        for (int r = 0; r < rows; r++)
            weight[r] = load_factors(weights + r * TILE + k);
        mix_key(rows, vectors, values[k] + d, weight, 0, sums);
        if (FACTORS > 1) {
            mix_key(rows, vectors, values[k + 1] + d, weight, 1, sums);
            mix_key(rows, vectors, values[k + 2] + d, weight, 2, sums);
            mix_key(rows, vectors, values[k + 3] + d, weight, 3, sums);
        }
    }
    for (; k < end; k++)
        for (int i = 0; i < vectors; i++) {
            vf value = load(values[k] + d + i * LANES);
            for (int r = 0; r < rows; r++)
                sums[r][i] = fused(value, splat(weights[r * TILE + k]), sums[r][i]);
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++)
            store(out + r * dim + i * LANES, sums[r][i]);
}

/* `mix` for all columns. The values are at offset `from` of the pointers. */
INLINE void mix_all(int rows, int more, const float *weights, const float *const *values, long from, long first, long end,
                    long dim, float *out)
{
    long d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        mix(rows, 4, more, weights, values, first, end, from + d, dim, out + d);
    for (; d < dim; d += LANES)
        mix(rows, 1, more, weights, values, first, end, from + d, dim, out + d);
}

static void cap(float *scores, long count, float softcap)
{
    for (long k = 0; k < count; k += LANES) {
        vf x = load(scores + k);
        vf twice = exp_lanes(pick(x > 44 * softcap, splat(44), x / softcap) * 2.0f);
        store(scores + k, pick(x == -INFINITY, x, softcap - 2.0f * softcap / (twice + 1.0f)));
    }
}

/* Subtract the ALiBi slope times the distance from the scores of the first `count` keys, a multiple of LANES. The first key has
 * the distance `away`. */
static void lean(float *scores, long count, float slope, long away)
{
    vf place;
    for (int i = 0; i < LANES; i++)
        place[i] = (float)(away + i);
    for (long k = 0; k < count; k += LANES, place += (float)LANES)
        store(scores + k, fused(place, splat(slope), load(scores + k)));
}

/* Convert the first `count` scores of one row, a multiple of STEP, to weights; return their maximum and sum. */
static void soften(float *scores, long count, float softcap, float *most, float *sum)
{
    if (softcap > 0)
        cap(scores, count, softcap);
    vf top[SIDE], total[2] = {{0}};
    for (int i = 0; i < SIDE; i++)
        top[i] = load(scores + i * LANES);
    for (long k = STEP; k < count; k += STEP)
        for (int i = 0; i < SIDE; i++)
            top[i] = larger(load(scores + k + i * LANES), top[i]);
    for (int i = 1; i < SIDE; i++)
        top[0] = larger(top[i], top[0]);
    float now = lanes_max(top[0]);
    *most = now;
    *sum = 0;
    if (now == -INFINITY) { /* all keys of this tile are masked */
        memset(scores, 0, (size_t)count * sizeof(float));
        return;
    }
    for (long k = 0; k < count; k += STEP) {
        vf weights[SIDE];
        for (int i = 0; i < SIDE; i++)
            weights[i] = load(scores + k + i * LANES) - now;
        two_to(SIDE, weights);
        for (int i = 0; i < SIDE; i++) {
            store(scores + k + i * LANES, weights[i]);
            total[i % 2] += weights[i];
        }
    }
    *sum = lanes_sum(total[0] + total[1]);
}

/* Scores of several rows with keys [first, end), a multiple of 4. */
INLINE void score_all(int rows, const float *q, const float *const *keys, long from, long first, long end, long dim,
                      float *out)
{
    for (long k = first; k < end; k += 4)
        score4(rows, q, keys + k, from, dim, out + k);
}

static void score_some(long rows, const float *q, const float *const *keys, long from, long first, long end, long dim,
                       float *out)
{
    switch (rows) {
#if ROWS == 6
    case 6: score_all(6, q, keys, from, first, end, dim, out); break;
    case 5: score_all(5, q, keys, from, first, end, dim, out); break;
#endif
#if ROWS >= 4
    case 4: score_all(4, q, keys, from, first, end, dim, out); break;
#endif
    case 3: score_all(3, q, keys, from, first, end, dim, out); break;
    case 2: score_all(2, q, keys, from, first, end, dim, out); break;
    default: score_all(1, q, keys, from, first, end, dim, out);
    }
}

static void mix_some(long rows, int more, const float *weights, const float *const *values, long from, long first, long end,
                     long dim, float *out)
{
    switch (rows) {
#if ROWS == 6
    case 6: mix_all(6, more, weights, values, from, first, end, dim, out); break;
    case 5: mix_all(5, more, weights, values, from, first, end, dim, out); break;
#endif
#if ROWS >= 4
    case 4: mix_all(4, more, weights, values, from, first, end, dim, out); break;
#endif
    case 3: mix_all(3, more, weights, values, from, first, end, dim, out); break;
    case 2: mix_all(2, more, weights, values, from, first, end, dim, out); break;
    default: mix_all(1, more, weights, values, from, first, end, dim, out);
    }
}

#ifdef HAS_AVX512

#define TURNED_KEYS (2 * LANES) /* transposed keys per iteration */
#define TURNED_ROWS 3           /* rows per iteration */
#define MAX_TURNED 256          /* maximum columns of a transposed key */

INLINE vf lanes_of_two(int high, vf a, vf b, int is_double)
{
    if (is_double)
        return high ? (vf)_mm512_unpackhi_pd((__m512d)a, (__m512d)b) : (vf)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
    return high ? (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b) : (vf)_mm512_unpacklo_ps((__m512)a, (__m512)b);
}

/* Transpose 16 columns of 16 keys with a stride of `stride` floats: into[i * TURNED_KEYS + k] = keys[k * stride + i]. */
INLINE void turn_sixteen(const float *keys, long stride, float *into)
{
    vf fours[4][4], quarter[4]; /* fours[g][i]: column i of each quarter, of keys 4g.. */
    for (int g = 0; g < 4; g++) {
        const float *at = keys + 4 * g * stride;
        vf pair[4];
        for (int i = 0; i < 4; i++)
            pair[i] = lanes_of_two(i % 2, load(at + i / 2 * 2 * stride), load(at + (i / 2 * 2 + 1) * stride), 0);
        for (int i = 0; i < 4; i++)
            fours[g][i] = lanes_of_two(i % 2, pair[i / 2], pair[i / 2 + 2], 1);
    }
    for (int i = 0; i < 4; i++) {
        __m512 low = (__m512)fours[0][i], high = (__m512)fours[1][i], third = (__m512)fours[2][i], last = (__m512)fours[3][i];
        quarter[0] = (vf)_mm512_shuffle_f32x4(low, high, 0x88), quarter[1] = (vf)_mm512_shuffle_f32x4(third, last, 0x88);
        quarter[2] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd), quarter[3] = (vf)_mm512_shuffle_f32x4(third, last, 0xdd);
        for (int j = 0; j < 4; j++) {
            __m512 a = (__m512)quarter[j % 2 * 2], b = (__m512)quarter[j % 2 * 2 + 1];
            store(into + (i + 4 * j) * TURNED_KEYS, (vf)(j < 2 ? _mm512_shuffle_f32x4(a, b, 0x88) : _mm512_shuffle_f32x4(a, b, 0xdd)));
        }
    }
}

/* Transpose contiguous keys [first, end) of a tile, multiples of TURNED_KEYS, in parts of TURNED_KEYS: a larger stride would leave
 * most of the L1 cache unused. */
static void turn_keys(const float *keys, long first, long end, long dim, float *into)
{
    for (long k = first; k < end; k += LANES)
        for (long d = 0; d < dim; d += LANES)
            turn_sixteen(keys + k * dim + d, dim, into + k / TURNED_KEYS * TURNED_KEYS * dim + d * TURNED_KEYS + k % TURNED_KEYS);
}

/* Bitwise equal to score4: the lanes of a score are summed separately and added in the order of lanes_sum4. */
INLINE void score_two_turned(int rows, const float *q, const float *keys, long dim, float *out)
{
    vf parts[4][TURNED_ROWS][2];
    _Pragma("GCC unroll 16")
    for (int n = 0; n < LANES; n++) {
        int lane = (n & 4) << 1 | (n & 8) >> 1 | (n & 1) << 1 | (n & 2) >> 1; /* 0 2 1 3, 8 10 9 11, 4 .. */
        vf sums[TURNED_ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++)
                sums[r][i] = splat(q[r * dim + lane]) * load(keys + lane * TURNED_KEYS + i * LANES);
        for (long d = LANES + lane; d < dim; d += LANES)
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++)
                    sums[r][i] = fused(splat(q[r * dim + d]), load(keys + d * TURNED_KEYS + i * LANES), sums[r][i]);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++) {
                vf sum = sums[r][i];
                int level = __builtin_ctz(~n); /* of the reduction tree */
                for (int l = 0; l < level; l++)
                    sum = parts[l][r][i] + sum;
                if (level < 4)
                    parts[level][r][i] = sum;
                else
                    store(out + r * TILE + i * LANES, sum);
            }
    }
}

/* Scores of several rows with TURNED_KEYS keys. */
static void score_turned(long rows, const float *q, const float *keys, long dim, float *out)
{
    switch (rows) {
    case 3: score_two_turned(3, q, keys, dim, out); break;
    case 2: score_two_turned(2, q, keys, dim, out); break;
    default: score_two_turned(1, q, keys, dim, out);
    }
}
#endif

/* Scores and weighted values of four rows with keys [first, end), a multiple of 4: like score_some and mix_some, for contiguous
 * keys and values. */
#ifdef HAS_NEON

#define ZERO(row) "movi v" #row ".4s, 0\n"
/* Products of 4 columns of a query with 4 keys, added to four sums. */
#define SCORE(op, query, sum0, sum1, sum2, sum3)                                                                                 \
    "ldr q20, [%[" #query "], %[d]]\n" op " v" #sum0 ".4s, v20.4s, v16.4s\n" op " v" #sum1 ".4s, v20.4s, v17.4s\n"               \
    op " v" #sum2 ".4s, v20.4s, v18.4s\n" op " v" #sum3 ".4s, v20.4s, v19.4s\n"
#define SCORES(op)                                                                                                               \
    "ldr q16, [%[k], %[d]]\nldr q17, [%[l], %[d]]\nldr q18, [%[m], %[d]]\nldr q19, [%[n], %[d]]\n" SCORE(op, q0, 0, 1, 2, 3)     \
    SCORE(op, q1, 4, 5, 6, 7) SCORE(op, q2, 8, 9, 10, 11) SCORE(op, q3, 12, 13, 14, 15)
#define PAIRS(to, from) "faddp v" #to ".4s, v" #to ".4s, v" #from ".4s\n"
#define MOVE(pointer, by) "add %[" #pointer "], %[" #pointer "], " #by "\n"
#define MIX(value, i0, i1, i2, i3, lane)                                                                                         \
    "fmla v" #i0 ".4s, v" #value ".4s, v16.s[" #lane "]\nfmla v" #i1 ".4s, v" #value ".4s, v17.s[" #lane "]\n"                   \
    "fmla v" #i2 ".4s, v" #value ".4s, v18.s[" #lane "]\nfmla v" #i3 ".4s, v" #value ".4s, v19.s[" #lane "]\n"
#define MIX_KEY(lane, a, b, c, e)                                                                                                \
    "ldp q" #a ", q" #b ", [%[v]]\nldp q" #c ", q" #e ", [%[v], 32]\nadd %[v], %[v], %[bytes]\n"                                 \
    MIX(a, 0, 4, 8, 12, lane) MIX(b, 1, 5, 9, 13, lane) MIX(c, 2, 6, 10, 14, lane) MIX(e, 3, 7, 11, 15, lane)
#define ZEROS                                                                                                                    \
    ZERO(0) ZERO(1) ZERO(2) ZERO(3) ZERO(4) ZERO(5) ZERO(6) ZERO(7) ZERO(8) ZERO(9) ZERO(10) ZERO(11) ZERO(12) ZERO(13)          \
    ZERO(14) ZERO(15)
#define USED                                                                                                                     \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18",   \
        "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "memory", "cc"

static void score_four(const float *q, const float *keys, long first, long end, long dim, float *out)
{
    const float *k = keys + first * dim, *l = k + dim, *m = l + dim, *n = m + dim;
    float *to = out + first;
    long count = end - first, bytes = 4 * dim, d = 0;
    if (count > 0)
        asm volatile("1:\nmov %[d], 0\n" SCORES("fmul") MOVE(d, 16)
                     "2:\n" SCORES("fmla") MOVE(d, 16) "cmp %[d], %[bytes]\nb.ne 2b\n"
                     PAIRS(0, 1) PAIRS(2, 3) PAIRS(4, 5) PAIRS(6, 7) PAIRS(8, 9) PAIRS(10, 11) PAIRS(12, 13) PAIRS(14, 15)
                     PAIRS(0, 2) PAIRS(4, 6) PAIRS(8, 10) PAIRS(12, 14)
                     MOVE(k, %[fours]) MOVE(l, %[fours]) MOVE(m, %[fours]) MOVE(n, %[fours])
                     "str q4, [%[out], %[row]]\nstr q8, [%[out], %[row] * 2]\nstr q12, [%[out], %[row] * 3]\nstr q0, [%[out]], 16\n"
                     "subs %[count], %[count], 4\nb.gt 1b\n"
                     : [k] "+r"(k), [l] "+r"(l), [m] "+r"(m), [n] "+r"(n), [out] "+r"(to), [count] "+r"(count), [d] "+r"(d)
                     : [q0] "r"(q), [q1] "r"(q + dim), [q2] "r"(q + 2 * dim), [q3] "r"(q + 3 * dim), [bytes] "r"(bytes),
                       [fours] "r"(4 * bytes), [row] "i"(4 * TILE)
                     : USED);
}

/* Sixteen columns of the values of `count` keys, a multiple of 4. */
static void mix_sixteen(const float *weights, const float *values, long count, long dim, float *out)
{
    long bytes = 4 * dim;
    if (count > 0)
        asm volatile(ZEROS "1:\nldr q17, [%[w], %[row]]\nldr q18, [%[w], %[row] * 2]\nldr q19, [%[w], %[row] * 3]\n"
                     "ldr q16, [%[w]], 16\n" MIX_KEY(0, 20, 21, 22, 23) MIX_KEY(1, 24, 25, 26, 27)
                     MIX_KEY(2, 20, 21, 22, 23) MIX_KEY(3, 24, 25, 26, 27) "subs %[count], %[count], 4\nb.gt 1b\n"
                     "stp q0, q1, [%[out]]\nstp q2, q3, [%[out], 32]\nadd %[out], %[out], %[bytes]\n"
                     "stp q4, q5, [%[out]]\nstp q6, q7, [%[out], 32]\nadd %[out], %[out], %[bytes]\n"
                     "stp q8, q9, [%[out]]\nstp q10, q11, [%[out], 32]\nadd %[out], %[out], %[bytes]\n"
                     "stp q12, q13, [%[out]]\nstp q14, q15, [%[out], 32]\n"
                     : [w] "+r"(weights), [v] "+r"(values), [count] "+r"(count), [out] "+r"(out)
                     : [bytes] "r"(bytes), [row] "i"(4 * TILE)
                     : USED);
}
#endif

#endif
