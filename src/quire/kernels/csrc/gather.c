/* Permutation of the columns of rows. */
#include <stdint.h>

typedef struct {
    void *out;
    const void *x;
    const int32_t *order;
    int64_t num_rows, columns, x_stride, bf16;
} GatherJob;

void quire_gather(const GatherJob *job)
{
    const int32_t *order = job->order;
    int64_t columns = job->columns;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < job->num_rows * columns; i++) {
        int64_t from = i / columns * job->x_stride + order[i % columns];
        if (job->bf16)
            ((uint16_t *)job->out)[i] = ((const uint16_t *)job->x)[from];
        else
            ((uint32_t *)job->out)[i] = ((const uint32_t *)job->x)[from];
    }
}
