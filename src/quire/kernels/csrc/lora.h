/* LoRA of one row, as shrink and expand; a row is bitwise equal in any batch. */
#ifndef QUIRE_LORA_H
#define QUIRE_LORA_H

#include <stdint.h>

/* A float or bfloat16 array, and the index of its first element that is used. */
typedef struct {
    const void *at;
    long start;
    int bf16;
} Numbers;

/* ranks[j] = x times row j of a [, size], for j in [first, end); `first` is a multiple of 4. */
void quire_lora_shrink(Numbers x, Numbers a, long size, long first, long end, float *ranks);

/* out[i] += row i of b [, rank] times `ranks`, for i in [first, end); `out_at` is the offset of out[0]. */
void quire_lora_expand(const float *ranks, Numbers b, long rank, long first, long end, void *out, int out_bf16, long out_at);

#endif
