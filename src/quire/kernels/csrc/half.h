/* Conversion of bfloat16 and scaled fp8 weights to wide float vectors.
 *
 * The bits of an fp8 value are moved into a float16, which the CPU converts, including subnormal numbers.
 */
#ifndef QUIRE_HALF_H
#define QUIRE_HALF_H

#include "matrix.h"
#include "simd_wide.h"

#define E4M3_FACTOR 256.0f /* an E4M3 value divided by the float16 that has its bits */

/* A float16 with the value of the code, or 1/256 of it. */
INLINE uint16_t half_of_fp8(int form, uint8_t code)
{
    uint16_t sign = (uint16_t)((code & 0x80) << 8), size = code & 0x7f;
    if (form == E5M2)
        return (uint16_t)(code << 8);
    return (uint16_t)(sign | (size == 0x7f ? 0x7e00 : size << 7));
}

INLINE wide wide_fp8(int form, const uint8_t *at)
{
#if WIDE == 16
    __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
    if (form == E5M2)
        return (wide)_mm512_cvtph_ps(_mm256_slli_epi16(bits, 8));
    bits = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16((int16_t)0xbf80));
    __m256i size = _mm256_slli_epi16(bits, 1), most = _mm256_set1_epi16(0x7f00);
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, most), _mm256_set1_epi16(0x7e00));
    return (wide)_mm512_cvtph_ps(_mm256_or_si256(bits, nan));
#elif WIDE == 8 && defined(__F16C__)
    __m128i bits = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)at));
    if (form == E5M2)
        return (wide)_mm256_cvtph_ps(_mm_slli_epi16(bits, 8));
    bits = _mm_and_si128(_mm_slli_epi16(bits, 7), _mm_set1_epi16((int16_t)0xbf80));
    __m128i nan = _mm_cmpeq_epi16(_mm_slli_epi16(bits, 1), _mm_set1_epi16(0x7f00));
    return (wide)_mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
#elif WIDE == 4 && defined(__ARM_NEON) && defined(__aarch64__)
    uint32_t four;
    memcpy(&four, at, 4);
    int16x4_t bits = vget_low_s16(vmovl_s8(vcreate_s8(four)));
    if (form == E5M2)
        return (wide)vcvt_f32_f16(vreinterpret_f16_s16(vshl_n_s16(bits, 8)));
    uint16x4_t moved = vand_u16(vreinterpret_u16_s16(vshl_n_s16(bits, 7)), vdup_n_u16(0xbf80));
    uint16x4_t nan = vceq_u16(vshl_n_u16(moved, 1), vdup_n_u16(0x7f00));
    return (wide)vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(moved, vand_u16(nan, vdup_n_u16(0x7e00)))));
#else
    float values[WIDE];
    for (int i = 0; i < WIDE; i++) {
        uint16_t half = half_of_fp8(form, at[i]);
        values[i] = from_half((const uint8_t *)&half);
    }
    return wide_load(values);
#endif
}

/* Load WIDE columns of the row at `from`, from column `k` on. */
INLINE wide wide_narrow(int form, const uint8_t *from, long k, float factor)
{
    if (form == BF16)
        return wide_bf16((const uint16_t *)from + k);
    return wide_fp8(form, from + k) * wide_splat(factor);
}

/* Load 2 * WIDE columns of a row of any plain format. */
INLINE void wide_two_of(int form, const uint8_t *from, long k, float factor, wide *into)
{
    if (form == F32 || form == BF16) {
        wide_two(from, form == BF16, k, into);
        return;
    }
    into[0] = wide_narrow(form, from, k, factor);
    into[1] = wide_narrow(form, from, k + WIDE, factor);
}

/* Load `count` columns of a row from column `k` on, one by one. */
INLINE void widen_of(int form, const uint8_t *from, long k, long count, float factor, float *into)
{
    if (form == F32 || form == BF16) {
        widen(from, form == BF16, k, count, 1, into);
        return;
    }
    for (long i = 0; i < count; i++) {
        uint16_t half = half_of_fp8(form, from[k + i]);
        into[i] = from_half((const uint8_t *)&half) * factor;
    }
}

/* Factors of the codes of columns [start, start + columns) of a row, one per BLOCK of columns. */
INLINE void read_factors(int form, const Matrix *part, long row, long start, long columns, float *into)
{
    if (!is_fp8(form))
        return;
    long each = part->scale_columns, across = (part->columns + each - 1) / each;
    const float *scales = part->scales + at_most(row, part->rows - 1) / part->scale_rows * across;
    for (long at = start; at < start + columns;) {
        long group = at / each, end = at_most((group + 1) * each, start + columns);
        for (; at < end; at += BLOCK)
            *into++ = scales[group] * (form == E4M3 ? E4M3_FACTOR : 1);
    }
}

#endif
