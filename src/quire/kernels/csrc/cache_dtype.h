/* KV cache dtypes: float, bfloat16, fp8, and int8 with a float scale behind each head. */
#ifndef QUIRE_CACHE_DTYPE_H
#define QUIRE_CACHE_DTYPE_H

#include <math.h>

#include "simd.h"

/* Equal to the numbers in cpu/attention.py. */
enum { KEPT_F32, KEPT_BF16, KEPT_E4M3, KEPT_E5M2, KEPT_INT8 };

INLINE long kept_bytes(int kind) { return kind == KEPT_F32 ? 4 : kind == KEPT_BF16 ? 2 : 1; }

/* Elements between the starts of two heads of a token. */
INLINE long head_step(int kind, long head_dim) { return head_dim + (kind == KEPT_INT8 ? (long)sizeof(float) : 0); }

typedef uint8_t vb __attribute__((vector_size(LANES)));

INLINE vu from_bytes(vb x)
{
#ifdef HAS_AVX512 /* the compiler would split the conversion in two */
    return (vu)_mm512_cvtepu8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

/* Subnormal numbers are computed from their codes as integers, since subnormal floats are slow on some CPUs. */
INLINE vf from_eight(vu code, int is_e5m2)
{
    vu size = code & 0x7f, sign = (code & 0x80) << 24, bits = size << (is_e5m2 ? 21 : 20);
    vf low = __builtin_convertvector((vi)size, vf) * (is_e5m2 ? 0x1p-16f : 0x1p-9f);
    vf value = pick((vi)(size < (is_e5m2 ? 4 : 8)), low, (vf)(bits + ((is_e5m2 ? 112u : 120u) << 23)));
    vu past = size > (is_e5m2 ? 0x7b : 0x7e); /* infinity or NaN */
    return (vf)((vu)value | sign | (past & 0x7f800000));
}

/* Convert to fp8: round to nearest, ties to even; larger values become the maximum. */
INLINE uint8_t to_eight(float x, int is_e5m2)
{
    float size = fabsf(x), most = is_e5m2 ? 57344.0f : 448.0f;
    uint32_t bits, sign = signbit(x) ? 0x80 : 0, shift = is_e5m2 ? 21 : 20;
    if (size != size)
        return 0x7f;
    size = size < most ? size : most;
    if (size < (is_e5m2 ? 0x1p-14f : 0x1p-6f)) { /* the addition rounds: the code is in the low bits */
        size += is_e5m2 ? 0x1p7f : 0x1p14f;
        memcpy(&bits, &size, 4);
        return (uint8_t)(sign | (bits & 0xff));
    }
    memcpy(&bits, &size, 4);
    bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1);
    return (uint8_t)(sign | ((bits >> shift) - (is_e5m2 ? 112u << 2 : 120u << 3)));
}

/* `widen` for any cache dtype; codes of int8 are multiplied by the scale behind them. */
INLINE void widen_kept(const void *from, int kind, long at, long count, float factor, float *into)
{
    if (kind == KEPT_INT8) {
        float scale;
        memcpy(&scale, (const int8_t *)from + at + count, sizeof scale);
        for (const uint8_t *x = (const uint8_t *)from + at; count > 0; x += LANES, into += LANES, count -= LANES) {
            vb code = {0};
            memcpy(&code, x, count < LANES ? (size_t)count : sizeof code);
            vi wide = (vi)(from_bytes(code) << 24) >> 24;
            put(into, 0, 0, count, __builtin_convertvector(wide, vf) * (scale * factor));
        }
        return;
    }
    if (kind < KEPT_E4M3) {
        widen(from, kind == KEPT_BF16, at, count, factor, into);
        return;
    }
    for (const uint8_t *x = (const uint8_t *)from + at; count > 0; x += LANES, into += LANES, count -= LANES) {
        vb code = {0};
        memcpy(&code, x, count < LANES ? (size_t)count : sizeof code);
        put(into, 0, 0, count, from_eight(from_bytes(code), kind == KEPT_E5M2) * factor);
    }
}

/* Quantize a head to int8: its absolute maximum has the code 127. The scale is stored behind the codes; NaN and infinity make
 * the scale NaN or infinite. */
INLINE void narrow_int8(const float *from, int8_t *into, long count, int is_bf16)
{
    float most = 1e-30f;
    for (long i = 0; i < count; i++) {
        float size = fabsf(is_bf16 ? from_bf16(to_bf16(from[i])) : from[i]);
        most = size > most || size != size ? size : most;
    }
    float scale = most / 127.0f;
    for (long i = 0; i < count; i++) {
        float code = (is_bf16 ? from_bf16(to_bf16(from[i])) : from[i]) / scale;
        into[i] = (int8_t)(code == code ? nearbyintf(code) : 0.0f);
    }
    memcpy(into + count, &scale, sizeof scale);
}

/* `narrow` for any cache dtype. Values for fp8 are first rounded to the dtype of the model, then divided by `scale`. */
INLINE void narrow_kept(const float *from, void *into, int kind, long at, long count, float scale, int is_bf16)
{
    if (kind < KEPT_E4M3) {
        narrow(from, into, kind == KEPT_BF16, at, count);
        return;
    }
    if (kind == KEPT_INT8) {
        narrow_int8(from, (int8_t *)into + at, count, is_bf16);
        return;
    }
    for (long i = 0; i < count; i++) {
        float x = is_bf16 ? from_bf16(to_bf16(from[i])) : from[i];
        ((uint8_t *)into)[at + i] = to_eight(x / scale, kind == KEPT_E5M2);
    }
}

#endif
