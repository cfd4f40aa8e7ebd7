/* Layout of rows of x for float GEMM. */
#ifndef QUIRE_PANELS_H
#define QUIRE_PANELS_H

#include "matrix.h"
#include "simd_wide.h"

#define STEP (WIDE == 16 ? 6 : WIDE == 8 ? 3 : 5) /* rows of x at a time, as many as registers allow */
#define MANY 16                                   /* minimum rows of x to be packed in panels */

/* Many rows are packed in panels: WIDE columns of STEP rows of x, or of four rows of the weight, then the next WIDE columns. A loop
 * reads two streams without cache conflicts, for any sizes. */
INLINE int in_panels(long num_rows) { return num_rows >= MANY; }
INLINE long panel_columns(long columns) { return (columns + WIDE - 1) / WIDE * WIDE; }

INLINE int is_read_as_it_is(const LinearJob *job)
{
    return !(job->x_bf16 || job->x_rows || job->parts->interleaved || in_panels(job->num_rows));
}

/* Rows of x per call of `quire_linear_prepare_some`. */
long quire_linear_together(const LinearJob *job);
void quire_linear_prepare_some(const LinearJob *job, long row, long count, uint8_t *into);

#endif
