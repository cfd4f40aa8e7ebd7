/* RMS norm of a row, and rotary embedding of a head. */
#ifndef QUIRE_HEADS_H
#define QUIRE_HEADS_H

#include <math.h>

#include "simd.h"

#define MAX_HEAD_DIM 1024

/* RMS norm of a row. All but the weight have the dtype of the model. The norm is rounded to it before a weight of this dtype is
 * applied; a float weight is applied first. */
INLINE void norm_row(const void *from, long from_at, const void *weight, int weight_bf16, void *into, long into_at, long size,
                     float eps, int bf16)
{
    vf squares = {0};
    for (long i = 0; i < size; i += LANES) {
        vf x = take(from, bf16, from_at + i, size - i);
        squares = fused(x, x, squares);
    }
    float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)size + eps);
    for (long i = 0; i < size; i += LANES) {
        vf x = rounded(take(from, bf16, from_at + i, size - i) * factor, bf16 && weight_bf16);
        put(into, bf16, into_at + i, size - i, x * take(weight, weight_bf16, i, size - i));
    }
}

/* Rotate the first half of a head with its second half, by the cosines and sines of the table at `at`. */
INLINE void turn(float *head, const void *table, long at, long half, int bf16)
{
    for (long i = 0; i < half; i += LANES) {
        long count = half - i;
        vf left = take(head, 0, i, count), right = take(head, 0, half + i, count);
        vf cosine = take(table, bf16, at + i, count), sine = take(table, bf16, at + half + i, count);
        put(head, 0, i, count, left * cosine - right * sine);
        put(head, 0, half + i, count, right * cosine + left * sine);
    }
}

#endif
