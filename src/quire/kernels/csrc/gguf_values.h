/* Dequantization of a packed weight to wide vectors. */
#ifndef QUIRE_GGUF_VALUES_H
#define QUIRE_GGUF_VALUES_H

#include "matrix.h"
#include "simd_wide.h"

/* Convert `count` scales or lows to floats. Up to 15 more are read and written. */
INLINE void read_heads(int form, const uint8_t *from, long count, float *into)
{
    for (long i = 0; form == E2M1 && i < count; i++)
        into[i] = half_power(from[i]);
    if (form == E2M1)
        return;
    if (!has_halves(form)) {
        memcpy(into, from, (size_t)count * 4);
        return;
    }
#if WIDE == 16
    for (long i = 0; i < count; i += 16)
        _mm512_storeu_ps(into + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + 2 * i))));
#elif defined(__F16C__)
    for (long i = 0; i < count; i += 8)
        _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#else
    for (long i = 0; i < count; i++)
        into[i] = from_half(from + 2 * i);
#endif
}

/* Scales and lows of columns [start, start + columns) of a row, and a pointer to their codes. */
INLINE const uint8_t *open_row(int form, const Matrix *part, long row, long start, long columns, float *scales, float *lows)
{
    const uint8_t *from = row_at(part, row);
    long blocks = part->columns / BLOCK, each = heads_of(form), first = start / BLOCK;
    read_heads(form, from + first * each * head_bytes(form), columns / BLOCK * each, scales);
    if (has_low(form))
        read_heads(form, from + (blocks + first) * each * head_bytes(form), columns / BLOCK * each, lows);
    return from + blocks * each * (has_low(form) + 1) * head_bytes(form) + first * code_bytes(form);
}

/* A block of 32 columns of one row as floats; `scale` and `low` have an entry for each head. */
#if WIDE == 16

INLINE void block_values(int form, const uint8_t *codes, const float *scale, const float *low, wide *into)
{
    const __m512 fours = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    int last = heads_of(form) - 1;
    for (int i = 0; i < 2; i++) {
        int h = i < last ? i : last;
        __m512 scales = _mm512_set1_ps(scale[h]), lows = has_low(form) ? _mm512_set1_ps(low[h]) : _mm512_setzero_ps();
        if (is_four(form)) { /* compute the values of all codes, then look them up by code */
            __m512 codes_of = _mm512_sub_ps(fours, _mm512_set1_ps(8));
            if (has_table(form))
                codes_of = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)table_of(form))));
            __m512 table = has_low(form) ? _mm512_fmadd_ps(scales, fours, lows) : _mm512_mul_ps(scales, codes_of);
            into[i] = (wide)_mm512_permutexvar_ps(i ? _mm512_srli_epi32(both, 4) : both, table);
        } else {
            __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + 16 * i));
            __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            into[i] = (wide)(has_low(form) ? _mm512_fmadd_ps(scales, values, lows) : _mm512_mul_ps(scales, values));
        }
    }
}

#else

typedef int32_t wide_int __attribute__((vector_size(4 * WIDE)));

INLINE wide_int wide_bytes(const uint8_t *at, int is_signed)
{
#if defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
    return (wide_int)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    wide_int values;
    for (int i = 0; i < WIDE; i++)
        values[i] = is_signed ? (int8_t)at[i] : at[i];
    return values;
#endif
}

INLINE void block_values(int form, const uint8_t *codes, const float *scale, const float *low, wide *into)
{
    for (int i = 0; i < BLOCK; i += WIDE) {
        int h = heads_of(form) == 2 ? i / 16 : 0;
        wide_int code = wide_bytes(codes + (is_four(form) ? i % 16 : i), !is_four(form));
        if (is_four(form))
            code = i < 16 ? code & 15 : code >> 4;
        if (has_table(form))
            for (int j = 0; j < WIDE; j++)
                code[j] = table_of(form)[code[j]];
        else if (is_four(form) && !has_low(form))
            code -= 8;
        wide values = __builtin_convertvector(code, wide) * scale[h];
        into[i / WIDE] = has_low(form) ? values + low[h] : values;
    }
}

#endif
#endif
