/* Float vectors of the CPU's full width, for GEMM: 16 lanes with AVX-512. */
#ifndef QUIRE_SIMD_WIDE_H
#define QUIRE_SIMD_WIDE_H

#include "simd.h"

#if defined(__AVX512F__)
#define WIDE 16
#else
#define WIDE LANES
#endif

typedef float wide __attribute__((vector_size(4 * WIDE)));
typedef float wide_any __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

INLINE wide wide_load(const float *at) { return *(const wide_any *)at; }
/* Force into a register: GCC would load it again for each product and saturate the load ports. */
INLINE wide wide_held(wide x)
{
#if WIDE == 8
    __asm__("" : "+x"(x));
#endif
    return x;
}
INLINE void wide_store(float *at, wide x) { *(wide_any *)at = x; }

#if WIDE == 16

INLINE wide wide_splat(float x) { return (wide)_mm512_set1_ps(x); }
INLINE wide wide_fused(wide a, wide b, wide c) { return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

/* out[i] = the sum of the lanes of x[i], always in the same order. */
INLINE void wide_sum4(const wide *x, float *out)
{
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#else

INLINE wide wide_splat(float x) { return splat(x); }
INLINE wide wide_fused(wide a, wide b, wide c) { return fused(a, b, c); }
INLINE void wide_sum4(const wide *x, float *out) { lanes_sum4(x, out); }

#endif

INLINE void add_sums(const wide *lanes, float *sums)
{
    float total[4];
    wide_sum4(lanes, total);
    for (int i = 0; i < 4; i++)
        sums[i] += total[i];
}

/* Sum of x * w over columns [start, end), which do not fill a vector. */
INLINE float rest(const float *x, const float *w, long start, long end)
{
    float sum = 0;
    for (long k = start; k < end; k++)
        sum += x[k] * w[k];
    return sum;
}

INLINE wide wide_bf16(const uint16_t *at)
{
#if WIDE == 16
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return (wide)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#elif defined(__AVX2__)
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return (wide)_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (wide)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16));
#else
    float values[WIDE];
    for (int i = 0; i < WIDE; i++)
        values[i] = from_bf16(at[i]);
    return wide_load(values);
#endif
}

INLINE void wide_two_bf16(const uint16_t *at, wide *into)
{
#if defined(__ARM_NEON) && defined(__aarch64__)
    uint16x8_t both = vld1q_u16(at), zero = vdupq_n_u16(0);
    into[0] = (wide)vreinterpretq_f32_u16(vzip1q_u16(zero, both));
    into[1] = (wide)vreinterpretq_f32_u16(vzip2q_u16(zero, both));
#else
    into[0] = wide_bf16(at);
    into[1] = wide_bf16(at + WIDE);
#endif
}

INLINE void wide_two(const void *from, int is_bf16, long at, wide *into)
{
    if (is_bf16) {
        wide_two_bf16((const uint16_t *)from + at, into);
        return;
    }
    into[0] = wide_load((const float *)from + at);
    into[1] = wide_load((const float *)from + at + WIDE);
}

#endif
