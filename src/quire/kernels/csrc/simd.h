/* Float vectors of the CPU's width, with the compiler's vector types. */
#ifndef QUIRE_SIMD_H
#define QUIRE_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

/* Floats per vector. Files that define ALL_LANES before the include use vectors of 16 if the CPU supports them. */
#if defined(LANES)
#elif defined(ALL_LANES) && defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

/* Intrinsics for vectors of LANES; otherwise the compiler's generic operations. */
#if LANES == 4 && defined(__ARM_NEON) && defined(__aarch64__)
#define HAS_NEON
#elif LANES == 8 && defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2
#elif LANES == 16 && defined(__AVX512F__)
#define HAS_AVX512
#endif

#define INLINE static inline __attribute__((always_inline))

/* count / by for numbers from 0 to 2^32 - 1: a division of 64 bits takes up to 90 cycles on some CPUs. */
INLINE long quotient(long count, long by) { return (long)((uint32_t)count / (uint32_t)by); }

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf load(const float *at) { return *(const vf_any *)at; }
INLINE void store(float *at, vf x) { *(vf_any *)at = x; }
/* Force x into a register: with few registers, the compiler would load it again for each use. */
INLINE vf held(vf x)
{
#ifdef HAS_AVX2
    __asm__ volatile("" : "+x"(x));
#endif
    return x;
}

/* a * b + c. The compiler must not fuse by itself (-ffp-contract=off): it could do so in one copy of a loop and not in another, and
 * results would depend on the batch. */
INLINE vf fused(vf a, vf b, vf c)
{
#ifdef HAS_NEON
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(HAS_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(HAS_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE vf splat(float x) { return x - (vf){0}; }

/* FACTORS values, and a * values[i] + c, with the instruction of the CPU if it has one. */
#ifdef HAS_NEON
#define FACTORS 4
typedef float32x4_t factors;
INLINE factors load_factors(const float *at) { return vld1q_f32(at); }
INLINE vf fused_by(vf a, factors by, int i, vf c)
{
    switch (i) { /* the instruction needs a constant */
    case 0: return (vf)vfmaq_laneq_f32((float32x4_t)c, (float32x4_t)a, by, 0);
    case 1: return (vf)vfmaq_laneq_f32((float32x4_t)c, (float32x4_t)a, by, 1);
    case 2: return (vf)vfmaq_laneq_f32((float32x4_t)c, (float32x4_t)a, by, 2);
    default: return (vf)vfmaq_laneq_f32((float32x4_t)c, (float32x4_t)a, by, 3);
    }
}
#else
#define FACTORS 1
typedef const float *factors;
INLINE factors load_factors(const float *at) { return at; }
INLINE vf fused_by(vf a, factors by, int i, vf c) { return fused(a, splat(by[i]), c); }
#endif

INLINE vf pick(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }

/* The larger of a and b in each lane; NaN if b is NaN. */
INLINE vf larger(vf a, vf b)
{
#ifdef HAS_NEON
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(HAS_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(HAS_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE vf smaller(vf a, vf b)
{
#ifdef HAS_NEON
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(HAS_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(HAS_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return pick(a < b, a, b);
#endif
}

INLINE float lanes_sum(vf x)
{
#ifdef HAS_NEON
    return vaddvq_f32((float32x4_t)x);
#elif defined(HAS_AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float half[LANES / 2], sum = 0;
    for (int i = 0; i < LANES / 2; i++)
        half[i] = x[i] + x[i + LANES / 2];
    for (int i = 0; i < LANES / 2; i++)
        sum += half[i];
    return sum;
#endif
}

INLINE float lanes_max(vf x)
{
#ifdef HAS_NEON
    return vmaxnmvq_f32((float32x4_t)x);
#elif defined(HAS_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++)
        most = x[i] > most ? x[i] : most;
    return most;
#endif
}

/* out[i] = the sum of the lanes of x[i], always in the same order. */
INLINE void lanes_sum4(const vf *x, float *out)
{
#ifdef HAS_NEON
    float32x4_t low = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
    float32x4_t high = vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
    vst1q_f32(out, vpaddq_f32(low, high));
#elif defined(HAS_AVX2)
    __m256 low = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]);
    __m256 high = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    __m256 both = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#elif defined(HAS_AVX512)
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int i = 0; i < 4; i++)
        out[i] = lanes_sum(x[i]);
#endif
}

/* A constant that the next operation may overwrite: loaded each time, which is cheaper than a copy. */
INLINE vf fresh(const vf *constant)
{
#ifdef HAS_NEON
    vf x;
    __asm__ volatile("ldr %q0, %1" : "=w"(x) : "m"(*constant));
    return x;
#else
    return *constant;
#endif
}

#define SAME4(x) x, x, x, x
#if LANES == 16
#define SAME(x) {SAME4(x), SAME4(x), SAME4(x), SAME4(x)}
#elif LANES == 8
#define SAME(x) {SAME4(x), SAME4(x)}
#else
#define SAME(x) {SAME4(x)}
#endif
#define SIDE (LANES == 4 ? 4 : 2) /* independent vectors per iteration, to hide latency */
#define EXPONENT (12582912.0f + 127) /* 1.5 * 2^23 and the exponent of 1: added to n, the low bits are the exponent of 2^n */

/* x[i] = 2^x[i] for x <= 0, with an error of at most 2 ulp; exactly 0 below -126.5. NaN stays NaN. */
INLINE void two_to(int count, vf *x)
{
    static const vf one = SAME(1.0f), second = SAME(0.240222421f), fourth = SAME(9.67151281e-3f);
    static const float others[4] = {1.32647272e-3f, 5.55073374e-2f, 0.693146978f};
    vf power[SIDE], square[SIDE], high[SIDE], low[SIDE];
    for (int i = 0; i < count; i++)
        x[i] = larger(splat(-127.0f), x[i]);
    for (int i = 0; i < count; i++)
        power[i] = x[i] + EXPONENT;
    for (int i = 0; i < count; i++)
        x[i] -= power[i] - EXPONENT;
    for (int i = 0; i < count; i++)
        high[i] = fused_by(x[i], load_factors(others), 0, fresh(&fourth));
    for (int i = 0; i < count; i++)
        square[i] = x[i] * x[i];
    for (int i = 0; i < count; i++)
        low[i] = fused_by(x[i], load_factors(others), 1, fresh(&second));
    for (int i = 0; i < count; i++)
        low[i] = fused(square[i], high[i], low[i]);
    for (int i = 0; i < count; i++)
        x[i] = fused(square[i], low[i], fused_by(x[i], load_factors(others), 2, fresh(&one)));
    for (int i = 0; i < count; i++)
        x[i] *= (vf)((vi)power[i] << 23);
}

/* x[i] = e^x[i] for x <= 88, with an error of at most 2 ulp; exactly 0 below -87.7. NaN stays NaN. */
INLINE void e_to(int count, vf *x)
{
    static const vf half = SAME(0.5f), fourth = SAME(1.0f / 24);
    static const float others[4] = {1.0f / 120, 1.0f / 6, -0.693145752f, -1.42860677e-6f};
    vf power[SIDE], square[SIDE], high[SIDE], low[SIDE];
    for (int i = 0; i < count; i++)
        x[i] = larger(splat(-88.1f), x[i]);
    for (int i = 0; i < count; i++) {
        power[i] = fused(x[i], splat(1.44269504f), splat(EXPONENT));
        high[i] = power[i] - EXPONENT;
    }
    for (int i = 0; i < count; i++)
        x[i] = fused_by(high[i], load_factors(others), 2, x[i]);
    for (int i = 0; i < count; i++)
        x[i] = fused_by(high[i], load_factors(others), 3, x[i]);
    for (int i = 0; i < count; i++) {
        square[i] = x[i] * x[i];
        high[i] = fused_by(x[i], load_factors(others), 0, fresh(&fourth));
    }
    for (int i = 0; i < count; i++)
        low[i] = fused_by(x[i], load_factors(others), 1, fresh(&half));
    for (int i = 0; i < count; i++)
        high[i] = fused(square[i], splat(1.0f / 720), high[i]);
    for (int i = 0; i < count; i++)
        low[i] = fused(square[i], high[i], low[i]);
    for (int i = 0; i < count; i++)
        x[i] = fused(square[i], low[i], x[i] + 1.0f);
    for (int i = 0; i < count; i++)
        x[i] *= (vf)((vi)power[i] << 23);
}

INLINE vf exp_lanes(vf x)
{
    e_to(1, &x);
    return x;
}

INLINE float exp_one(float x) { return exp_lanes(splat(x))[0]; }

INLINE float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Convert to bfloat16: round to nearest, ties to even. */
INLINE uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

INLINE vf from_halves(vh x)
{
#ifdef HAS_AVX512 /* the compiler would split the conversion in two */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

/* The upper 16 bits of each lane. */
INLINE vh to_halves(vf x)
{
#ifdef HAS_AVX512
    return (vh)_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)x, 16));
#else
    return __builtin_convertvector((vu)x >> 16, vh);
#endif
}

/* Round to the nearest bfloat16 and convert back. */
INLINE vf rounded(vf x, int to_bf16)
{
    if (!to_bf16)
        return x;
    vu bits = (vu)x, nan = (bits & 0x7fffffff) > 0x7f800000;
    vu near = bits + 0x7fff + (bits >> 16 & 1);
    return (vf)(((nan & (bits | 0x400000)) | (~nan & near)) & 0xffff0000);
}

/* Load LANES values at `at`, or as many as are left, then zeros. */
INLINE vf take(const void *from, int is_bf16, long at, long left)
{
    if (is_bf16) {
        vh half = {0};
        if (left >= LANES)
            memcpy(&half, (const uint16_t *)from + at, sizeof half);
        else
            memcpy(&half, (const uint16_t *)from + at, (size_t)left * 2);
        return from_halves(half);
    }
    if (left >= LANES)
        return load((const float *)from + at);
    vf whole = {0};
    memcpy(&whole, (const float *)from + at, (size_t)left * 4);
    return whole;
}

/* Store LANES values at `at`, or as many as are left. */
INLINE void put(void *into, int is_bf16, long at, long left, vf x)
{
    if (is_bf16) {
        vh half = to_halves(rounded(x, 1));
        if (left >= LANES)
            memcpy((uint16_t *)into + at, &half, sizeof half);
        else
            memcpy((uint16_t *)into + at, &half, (size_t)left * 2);
    } else if (left >= LANES)
        store((float *)into + at, x);
    else
        memcpy((float *)into + at, &x, (size_t)left * 4);
}

INLINE void widen(const void *from, int is_bf16, long at, long count, float factor, float *into)
{
    if (is_bf16) {
        const uint16_t *x = (const uint16_t *)from + at;
        for (long i = 0; i < count; i++)
            into[i] = from_bf16(x[i]) * factor;
    } else {
        const float *x = (const float *)from + at;
        for (long i = 0; i < count; i++)
            into[i] = x[i] * factor;
    }
}

INLINE void narrow(const float *from, void *into, int is_bf16, long at, long count)
{
    if (is_bf16)
        for (long i = 0; i < count; i++)
            ((uint16_t *)into)[at + i] = to_bf16(from[i]);
    else
        memcpy((float *)into + at, from, (size_t)count * 4);
}

#endif
