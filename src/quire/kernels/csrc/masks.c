/* Masks the logits of tokens that a grammar does not allow. The reference in numpy is `sampling/constrain.py`.
 */
#include <stdint.h>

#define TILE 128 /* words per task */

/* The same fields in the same order as in kernels/cpu/masks.py. */
typedef struct {
    void *x;               /* [rows, vocab] float32, or bfloat16 */
    const int32_t *packed; /* [masks, 1 + words] for each mask the index of its row of x, then a bit per token: 1 if allowed */
    int64_t num_masks, num_words, vocab, stride, bf16;
} MaskJob;

#define REMOVE(type, never)                                                     \
    static inline void remove_##type(type *x, uint32_t allowed, uint32_t count) \
    {                                                                           \
        for (uint32_t i = 0; i < count; i++)                                    \
            x[i] = allowed >> i & 1 ? x[i] : never;                             \
    }
/* Functions that write the bits of minus infinity to disallowed logits. */
REMOVE(uint32_t, 0xff800000u)
REMOVE(uint16_t, 0xff80u)

void quire_mask(const MaskJob *job)
{
    long all_words = (job->vocab + 31) / 32, tiles = (all_words + TILE - 1) / TILE;
#pragma omp for collapse(2)
    for (long mask = 0; mask < job->num_masks; mask++)
        for (long tile = 0; tile < tiles; tile++) {
            const int32_t *packed = job->packed + mask * (1 + job->num_words);
            long row = packed[0] * job->stride, end = (tile + 1) * TILE < all_words ? (tile + 1) * TILE : all_words;
            for (long word = tile * TILE; word < end; word++) {
                uint32_t allowed = word < job->num_words ? (uint32_t)packed[1 + word] : 0;
                long at = row + word * 32, left = job->vocab - word * 32;
                if (allowed == UINT32_MAX)
                    continue;
                if (job->bf16)
                    remove_uint16_t((uint16_t *)job->x + at, allowed, left < 32 ? left : 32);
                else
                    remove_uint32_t((uint32_t *)job->x + at, allowed, left < 32 ? left : 32);
            }
        }
}
