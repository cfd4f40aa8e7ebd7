/* Activations, alone and gated. */
#ifndef QUIRE_ACTIVATIONS_H
#define QUIRE_ACTIVATIONS_H

#include "simd.h"

/* Equal to the numbers in reference/activations.py. */
enum { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU };

#define CLAMP 7.0f /* of CLAMPED_SWIGLU */
#define SLOPE 1.702f

/* x[i] / (1 + e^by[i]); `by` is overwritten. */
INLINE void damp(int count, vf *x, vf *by)
{
    for (int i = 0; i < count; i++)
        by[i] = smaller(splat(88.0f), by[i]);
    e_to(count, by);
    for (int i = 0; i < count; i++)
        x[i] = x[i] / (by[i] + 1.0f);
}

/* x[i] = x[i] * (1 + erf(x[i] / sqrt(2))) / 2, with the error function of Abramowitz and Stegun 7.1.26: to 2e-7. */
INLINE void gelu(int count, vf *x)
{
    static const float factors_of[5] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    vf e[SIDE];
    for (int i = 0; i < count; i++)
        e[i] = x[i] * x[i] * -0.5f;
    e_to(count, e);
    for (int i = 0; i < count; i++) {
        vf size = pick(x[i] < 0.0f, -x[i], x[i]), t = 1.0f / fused(size, splat(0.3275911f * 0.70710678f), splat(1.0f)), sum = {0};
        for (int j = 0; j < 5; j++)
            sum = fused(sum, t, splat(factors_of[j]));
        vf tail = smaller(splat(1e30f), x[i]) * (0.5f * (sum * t * e[i])); /* infinity * 0 would be NaN */
        x[i] = pick(x[i] < 0.0f, tail, x[i] - tail);
    }
}

INLINE void activate_lanes(int kind, int count, vf *x)
{
    vf by[SIDE];
    switch (kind) {
    case SILU:
        for (int i = 0; i < count; i++)
            by[i] = -x[i];
        damp(count, x, by);
        break;
    case GELU: gelu(count, x); break;
    case GELU_TANH: /* (1 + tanh(u)) / 2 is 1 / (1 + e^-2u) */
        for (int i = 0; i < count; i++)
            by[i] = x[i] * -1.59576912f * fused(x[i] * x[i], splat(0.044715f), splat(1.0f));
        damp(count, x, by);
        break;
    case CLAMPED_SWIGLU:
        for (int i = 0; i < count; i++) {
            x[i] = smaller(splat(CLAMP), x[i]);
            by[i] = x[i] * -SLOPE;
        }
        damp(count, x, by);
        break;
    default:
        for (int i = 0; i < count; i++) {
            x[i] = larger(splat(0), x[i]);
            x[i] *= kind == RELU2 ? x[i] : splat(1.0f);
        }
    }
}

/* out = act(x) for `count` vectors, times `up` if it is not NULL. The last vector has `left` lanes. `out` may be `x`. If `bound`
 * is not 0, act(x) is at most `bound`, and `up` is clamped to [-bound, bound]. */
INLINE void activate_some(int kind, float bound, int count, const void *x, long at, const void *up, long up_at, void *out,
                          long out_at, long left, int bf16)
{
    vf values[SIDE];
    for (int i = 0; i < count; i++)
        values[i] = take(x, bf16, at + i * LANES, left - i * LANES);
    activate_lanes(kind, count, values);
    for (int i = 0; i < count; i++) {
        if (up) {
            vf by = take(up, bf16, up_at + i * LANES, left - i * LANES);
            if (kind == CLAMPED_SWIGLU)
                by = smaller(splat(CLAMP), larger(splat(-CLAMP), by)) + 1.0f;
            if (bound > 0.0f) {
                values[i] = smaller(splat(bound), values[i]);
                by = smaller(splat(bound), larger(splat(-bound), by));
            }
            values[i] = rounded(values[i], bf16) * by;
        }
        put(out, bf16, out_at + i * LANES, left - i * LANES, values[i]);
    }
}

/* `activate_some` for `size` columns. */
INLINE void activate_all(int kind, float bound, const void *x, long at, const void *up, long up_at, void *out, long out_at,
                         long size, int bf16)
{
    long i = 0;
    for (; i + SIDE * LANES <= size; i += SIDE * LANES)
        activate_some(kind, bound, SIDE, x, at + i, up, up_at + i, out, out_at + i, SIDE * LANES, bf16);
    for (; i < size; i += LANES)
        activate_some(kind, bound, 1, x, at + i, up, up_at + i, out, out_at + i, size - i, bf16);
}

/* `activate_all`, compiled for SILU with a bound and for any activation without one. */
INLINE void activate(int kind, float bound, const void *x, long at, const void *up, long up_at, void *out, long out_at,
                     long size, int bf16)
{
    if (bound > 0.0f)
        activate_all(SILU, bound, x, at, up, up_at, out, out_at, size, bf16);
    else
        activate_all(kind, 0.0f, x, at, up, up_at, out, out_at, size, bf16);
}

#endif
