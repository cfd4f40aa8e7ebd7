/* Conversion of rows of x to the input format of the GEMM kernels. */
#include "panels.h"

#if defined(DOT_NEON) || defined(DOT_X86)
/* Rows of x per panel in scratch memory. */
INLINE long lanes_of(const LinearJob *job) { return job->num_rows < PANEL ? 1 : PANEL; }

INLINE void round_row(const LinearJob *job, const float *x, long blocks, uint8_t *into)
{
#ifdef DOT_X86
    quire_round_row(x, blocks, lanes_of(job), into);
#else
    (void)job;
    quire_round_row(x, blocks, into);
#endif
}
#endif

INLINE void panel_row(const void *x, int is_bf16, long from, long columns, float *into)
{
    wide values[2];
    long k = 0;
    for (; k + 2 * WIDE <= columns; k += 2 * WIDE, into += 2 * STEP * WIDE) {
        wide_two(x, is_bf16, from + k, values);
        wide_store(into, values[0]);
        wide_store(into + STEP * WIDE, values[1]);
    }
    for (; k < columns; k += WIDE, into += STEP * WIDE)
        widen(x, is_bf16, from + k, at_most(WIDE, columns - k), 1, into);
}

/* Offset of a row of x. Rows after the last row repeat the last row. */
INLINE long x_at(const LinearJob *job, long row)
{
    row = at_most(row, job->num_rows - 1);
    return (job->x_rows ? job->x_rows[row] : row) * job->x_stride;
}

void quire_linear_prepare(const LinearJob *job, long row, uint8_t *into)
{
    long columns = job->parts->columns, from = x_at(job, row);
#if defined(DOT_NEON) || defined(DOT_X86)
    if (job->parts->interleaved) {
        long blocks = columns / BLOCK, lanes = lanes_of(job);
        into += row / lanes * lanes * blocks * ROUNDED_BYTES + row % lanes * 4;
        if (!job->x_bf16) {
            round_row(job, (const float *)job->x + from, blocks, into);
            return;
        }
        for (long b = 0; b < blocks; b++, into += lanes * ROUNDED_BYTES) {
            float values[BLOCK];
            widen(job->x, 1, from + b * BLOCK, BLOCK, 1, values);
            round_row(job, values, 1, into);
        }
        return;
    }
#endif
    if (in_panels(job->num_rows)) {
        float *to = (float *)into + row / STEP * STEP * panel_columns(columns) + row % STEP * WIDE;
        if (job->x_bf16)
            panel_row(job->x, 1, from, columns, to);
        else
            panel_row(job->x, 0, from, columns, to);
    } else
        widen(job->x, (int)job->x_bf16, from, columns, 1, (float *)into + row * columns);
}

/* Quantized panels of float rows are prepared as a whole, other rows one by one. */
long quire_linear_together(const LinearJob *job)
{
    (void)job;
#ifdef DOT_X86
    if (job->parts->interleaved && !job->x_bf16)
        return lanes_of(job);
#endif
    return 1;
}

void quire_linear_prepare_some(const LinearJob *job, long row, long count, uint8_t *into)
{
    if (count == 1) {
        quire_linear_prepare(job, row, into);
        return;
    }
#ifdef DOT_X86
    const float *rows[PANEL];
    long blocks = job->parts->columns / BLOCK;
    for (long r = 0; r < PANEL; r++)
        rows[r] = (const float *)job->x + x_at(job, row + r);
    quire_round_panel(rows, blocks, into + row * blocks * ROUNDED_BYTES);
#endif
}

long quire_linear_rows(const LinearJob *job)
{
    long panel = job->parts->interleaved ? PANEL : in_panels(job->num_rows) ? STEP : 1, rows = job->num_rows;
    return is_read_as_it_is(job) ? 0 : rows > panel ? (rows + panel - 1) / panel * panel : rows;
}
