/* out = x W^T + bias: float GEMM with plain or dequantized weights, and dispatch to the integer GEMM of gguf*.c.
 *
 * In float, every output is summed over the columns in order, in WIDE lanes and CHUNK columns at a time. It is bitwise equal
 * for any number of rows of x, any division of the work and any format of the weight.
 */
#include <omp.h>

#include "half.h"
#include "panels.h"
#include "gguf_values.h"

#if WIDE == 16
#define CHUNK 640 /* columns that are summed before the lanes are reduced: ten rows fit into 32 KiB */
#else
#define CHUNK 1024
#endif
#define HEADS (CHUNK / 16)
#ifdef DOT_NEON
#define TILE 8 /* rows of the weight per tile */
#else
#define TILE 16
#endif
#define TILES 8                        /* tiles per chunk of columns with many rows of x */
#define TASK_ROWS (264 / STEP * STEP)  /* maximum rows of x per task */
#define FEW (WIDE > 4 ? 4 : 1)         /* maximum rows of x that are computed without unpacking to memory */
#define TASK_BYTES 65536               /* maximum weight bytes of a task times rows of x */
#define SHARES 4                       /* minimum tasks per thread */
#ifdef DOT_NEON
#define TASK_UNITS 4 /* minimum units of interleaved weights per task, if there are enough; gguf.c computes them together */
#else
#define TASK_UNITS 1
#endif

/* Sums stay in registers only if all loops over them are unrolled. */
#define UNROLL _Pragma("GCC unroll 8")
#if WIDE > 4
#define UNROLL_WIDE UNROLL
#else
#define UNROLL_WIDE /* slow to compile, and such a CPU does not use this path */
#endif

typedef struct {
    const float *x; /* the first row */
    long stride, count;
    int panels;
} Rows;

INLINE const float *x_row(const Rows *x, long row) { return x->x + at_most(row, x->count - 1) * x->stride; }

/* The hardware prefetcher does not detect four interleaved streams: prefetch the next four rows. */
INLINE void fetch(const void *at, long ahead) { __builtin_prefetch((const uint8_t *)at + ahead); }

/* sums[r * TILE + i] += row r of x times w[i], over `columns` columns. `ahead`: offset of the next rows in bytes, or 0. */
INLINE void times_floats(int count, const Rows *x, long first, const float *const w[4], long columns, long ahead, float *sums)
{
    wide sum[STEP][4];
    const float *from = x->x + first * x->stride;
    long k = 0;
    UNROLL
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 4; i++)
            sum[r][i] = (wide){0};
    for (; k + WIDE <= columns; k += WIDE) {
        for (int i = 0; ahead && i < 4; i++)
            fetch(w[i] + k, ahead);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < 4; i++)
                sum[r][i] = wide_fused(wide_load(from + r * x->stride + k), wide_load(w[i] + k), sum[r][i]);
    }
    UNROLL
    for (int r = 0; r < count; r++)
        add_sums(sum[r], sums + r * TILE);
    if (k < columns)
        for (int r = 0; r < count; r++)
            for (int i = 0; i < 4; i++)
                sums[r * TILE + i] += rest(from + r * x->stride, w[i], k, columns);
}

/* Fewer than MANY rows of x times 4 rows of the weight. */
static void times_tile(const Rows *x, const float *const w[4], long columns, long ahead, float *sums)
{
    long r = 0;
    if (ahead && x->count <= 2) {
        if (x->count == 1)
            times_floats(1, x, 0, w, columns, ahead, sums);
        else
            times_floats(2, x, 0, w, columns, ahead, sums);
        return;
    }
    for (; r + STEP <= x->count; r += STEP)
        times_floats(STEP, x, r, w, columns, 0, sums + r * TILE);
    for (; STEP > 4 && r + 4 <= x->count; r += 4)
        times_floats(STEP > 4 ? 4 : 1, x, r, w, columns, 0, sums + r * TILE);
    for (; r + 2 <= x->count; r += 2)
        times_floats(2, x, r, w, columns, 0, sums + r * TILE);
    for (; r < x->count; r++)
        times_floats(1, x, r, w, columns, 0, sums + r * TILE);
}

INLINE void times_panel(int count, const float *x, const float *w, long columns, float *sums)
{
    wide sum[STEP][4];
    long k = 0;
    UNROLL
    for (int r = 0; r < count; r++)
        for (int i = 0; i < 4; i++)
            sum[r][i] = (wide){0};
    for (; k + WIDE <= columns; k += WIDE, x += STEP * WIDE, w += 4 * WIDE)
        for (int i = 0; i < 4; i++) {
            wide value = wide_held(wide_load(w + i * WIDE));
            for (int r = 0; r < count; r++)
                sum[r][i] = wide_fused(wide_load(x + r * WIDE), value, sum[r][i]);
        }
    UNROLL
    for (int r = 0; r < count; r++)
        add_sums(sum[r], sums + r * TILE);
    if (k < columns)
        for (int r = 0; r < count; r++)
            for (int i = 0; i < 4; i++)
                sums[r * TILE + i] += rest(x + r * WIDE, w + i * WIDE, 0, columns - k);
}

/* Rows of x in panels times a tile of the weight. A panel is used for the whole tile, and may repeat the last row as padding. */
static void times_panels(const Rows *x, const float *tile, long num, long columns, float *sums)
{
    for (long r = 0; r < x->count; r += STEP)
        for (long i = 0; i < num; i += 4) {
            const float *from = x->x + r * x->stride, *w = tile + i * CHUNK;
            if (STEP <= 4 || x->count - r > 4)
                times_panel(STEP, from, w, columns, sums + r * TILE + i);
            else if (x->count - r > 2)
                times_panel(STEP > 4 ? 4 : 1, from, w, columns, sums + r * TILE + i);
            else
                times_panel(2, from, w, columns, sums + r * TILE + i);
        }
}

/* `times_tile` without unpacking to memory: `num` rows of the weight (4 or 8), columns [start, start + columns), few rows of x.
 * `count` may exceed the number of rows: the last row is then repeated. */
INLINE void times_narrow(int form, int count, int num, const Rows *x, const Matrix *part, long row, long start, long columns,
                         float *sums)
{
    wide sum[FEW][8], values[2];
    float factors[8][CHUNK / BLOCK];
    const uint8_t *w[8];
    const float *from[FEW];
    long k = 0;
    for (int r = 0; r < count; r++)
        from[r] = x_row(x, r);
    UNROLL
    for (int i = 0; i < num; i++) {
        w[i] = row_at(part, row + i) + start * plain_bytes(form);
        read_factors(form, part, row + i, start, columns, factors[i]);
        for (int r = 0; r < count; r++)
            sum[r][i] = (wide){0};
    }
    for (; k + 2 * WIDE <= columns; k += 2 * WIDE)
        UNROLL
        for (int i = 0; i < num; i++) {
            wide_two_of(form, w[i], k, factors[i][k / BLOCK], values);
            fetch(w[i] + k * plain_bytes(form), num * part->row_bytes);
            for (int r = 0; r < count; r++)
                for (int j = 0; j < 2; j++)
                    sum[r][i] = wide_fused(wide_load(from[r] + k + j * WIDE), values[j], sum[r][i]);
        }
    for (; k + WIDE <= columns; k += WIDE)
        UNROLL
        for (int i = 0; i < num; i++)
            for (int r = 0; r < count; r++)
                sum[r][i] = wide_fused(wide_load(from[r] + k), wide_narrow(form, w[i], k, factors[i][k / BLOCK]), sum[r][i]);
    UNROLL
    for (int r = 0; r < count; r++)
        for (int i = 0; i < num; i += 4)
            add_sums(sum[r] + i, sums + r * TILE + i);
    for (int i = 0; k < columns && i < num; i++) {
        float left[WIDE];
        widen_of(form, w[i], k, columns - k, factors[i][k / BLOCK], left);
        for (int r = 0; r < count; r++)
            sums[r * TILE + i] += rest(from[r] + k, left, 0, columns - k);
    }
}

INLINE void times_packed(int form, int count, const Rows *x, const Matrix *part, long row, long start, long columns, float *sums)
{
    float scales[4][HEADS], lows[4][HEADS];
    wide sum[FEW][4], values[BLOCK / WIDE];
    long each = heads_of(form);
    const uint8_t *codes[4];
    const float *from[FEW];
    for (int r = 0; r < count; r++)
        from[r] = x_row(x, r);
    UNROLL_WIDE
    for (int i = 0; i < 4; i++) {
        codes[i] = open_row(form, part, row + i, start, columns, scales[i], lows[i]);
        for (int r = 0; r < count; r++)
            sum[r][i] = (wide){0};
    }
    for (long b = 0; b < columns / BLOCK; b++)
        UNROLL_WIDE
        for (int i = 0; i < 4; i++) {
            block_values(form, codes[i] + b * code_bytes(form), scales[i] + b * each, lows[i] + b * each, values);
            for (int r = 0; r < count; r++)
                for (int j = 0; j < BLOCK / WIDE; j++)
                    sum[r][i] = wide_fused(wide_load(from[r] + b * BLOCK + j * WIDE), values[j], sum[r][i]);
        }
    UNROLL
    for (int r = 0; r < count; r++)
        add_sums(sum[r], sums + r * TILE);
}

INLINE void times_few(int form, int count, const Rows *x, const Matrix *part, long row, long start, long columns, float *sums)
{
    if (!is_packed(form))
        times_narrow(form, count, count == 1 ? 8 : 4, x, part, row, start, columns, sums);
    else
        times_packed(form, count, x, part, row, start, columns, sums);
}

/* Offset of WIDE columns of row i of a tile. */
INLINE float *tile_at(float *tile, int panels, long i, long k)
{
    return panels ? tile + i / 4 * 4 * CHUNK + 4 * k + i % 4 * WIDE : tile + i * CHUNK + k;
}

/* Convert rows [i, i + 4) of a tile, which begins at `row` of a weight in a plain format, to float. */
INLINE void unpack_plain(int form, int panels, const Matrix *part, long row, long start, long columns, float *tile, int i)
{
    wide values[4][2];
    float factors[4][CHUNK / BLOCK];
    const uint8_t *from[4];
    long whole = columns / (2 * WIDE) * 2 * WIDE;
    for (int j = 0; j < 4; j++) {
        from[j] = row_at(part, row + i + j) + start * plain_bytes(form);
        read_factors(form, part, row + i + j, start, columns, factors[j]);
    }
    for (long k = 0; k < whole; k += 2 * WIDE) {
        for (int j = 0; j < 4; j++)
            wide_two_of(form, from[j], k, factors[j][k / BLOCK], values[j]);
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < 4; j++)
                wide_store(tile_at(tile, panels, i + j, k + half * WIDE), values[j][half]);
    }
    for (int j = 0; j < 4; j++)
        for (long k = whole; k < columns; k += WIDE)
            widen_of(form, from[j], k, at_most(WIDE, columns - k), factors[j][k / BLOCK], tile_at(tile, panels, i + j, k));
}

INLINE void unpack_tile(int form, int panels, const Matrix *part, long row, long start, long columns, float *tile)
{
    float scales[HEADS], lows[HEADS];
    wide values[BLOCK / WIDE];
    for (int i = 0; !is_packed(form) && i < TILE; i += 4)
        unpack_plain(form, panels, part, row, start, columns, tile, i);
    for (int i = 0; is_packed(form) && i < TILE; i++) {
        const uint8_t *codes = open_row(form, part, row + i, start, columns, scales, lows);
        long each = heads_of(form);
        for (long b = 0; b < columns / BLOCK; b++) {
            block_values(form, codes + b * code_bytes(form), scales + b * each, lows + b * each, values);
            for (int j = 0; j < BLOCK / WIDE; j++)
                wide_store(tile_at(tile, panels, i, b * BLOCK + j * WIDE), values[j]);
        }
    }
}

/* Add the products of x with rows [row, row + TILE) of a part over columns [start, start + columns) to `sums`. */
INLINE void times_rows(int form, const Rows *x, const Matrix *part, long row, long start, long columns, float *sums)
{
    _Alignas(64) float tile[TILE * CHUNK];
    long num = at_most(TILE, part->rows - row);
    const int direct = form == F32;
    Rows now = {x->x + start * (x->panels ? STEP : 1), x->stride, x->count, x->panels};
    if (x->panels) {
        unpack_tile(form, 1, part, row, start, columns, tile);
        times_panels(&now, tile, num, columns, sums);
        return;
    }
    if (!direct && x->count <= FEW) {
        int one = FEW == 1 || x->count == 1;
        for (long i = 0; i < num; i += one && !is_packed(form) ? 8 : 4)
            if (one)
                times_few(form, 1, &now, part, row + i, start, columns, sums + i);
            else
                times_few(form, FEW, &now, part, row + i, start, columns, sums + i);
        return;
    }
    if (!direct)
        unpack_tile(form, 0, part, row, start, columns, tile);
    for (long i = 0; i < num; i += 4) {
        const float *w[4];
        for (int j = 0; j < 4; j++)
            w[j] = direct ? (const float *)row_at(part, row + i + j) + start : tile_at(tile, 0, i + j, 0);
        times_tile(&now, w, columns, direct ? 4 * part->row_bytes : 0, sums + i);
    }
}

static void times_form(const Rows *x, const Matrix *part, long row, long start, long columns, float *sums)
{
    switch (part->form) {
    case F32: times_rows(F32, x, part, row, start, columns, sums); break;
    case BF16: times_rows(BF16, x, part, row, start, columns, sums); break;
    case FOUR_H: times_rows(FOUR_H, x, part, row, start, columns, sums); break;
    case FOUR_LOW_H: times_rows(FOUR_LOW_H, x, part, row, start, columns, sums); break;
    case EIGHT_H: times_rows(EIGHT_H, x, part, row, start, columns, sums); break;
    case FOUR_LOW_F: times_rows(FOUR_LOW_F, x, part, row, start, columns, sums); break;
    case EIGHT_LOW_F: times_rows(EIGHT_LOW_F, x, part, row, start, columns, sums); break;
    case FOUR_LOW_F_16: times_rows(FOUR_LOW_F_16, x, part, row, start, columns, sums); break;
    case EIGHT_F_16: times_rows(EIGHT_F_16, x, part, row, start, columns, sums); break;
    case E2M1: times_rows(E2M1, x, part, row, start, columns, sums); break;
    case IQ2_F_16: times_rows(IQ2_F_16, x, part, row, start, columns, sums); break;
    case IQ3_F: times_rows(IQ3_F, x, part, row, start, columns, sums); break;
    case IQ4_F: times_rows(IQ4_F, x, part, row, start, columns, sums); break;
    case E2M1_F_16: times_rows(E2M1_F_16, x, part, row, start, columns, sums); break;
    case E4M3: times_rows(E4M3, x, part, row, start, columns, sums); break;
    default: times_rows(E5M2, x, part, row, start, columns, sums);
    }
}

/* Tiles of the weight that share a chunk of columns: few rows of x read the weight in memory order, many rows keep their chunk in
 * the CPU cache. */
INLINE long tiles_at_once(int panels) { return panels ? TILES : 1; }

static void float_task(const LinearJob *job, const Matrix *part, const Rows *x, long at, long first, long row, long row_end)
{
    float sums[TILES][TASK_ROWS][TILE];
    long size = TILE * tiles_at_once(x->panels), rows = x->panels ? (x->count + STEP - 1) / STEP * STEP : x->count + FEW;
    for (; row < row_end; row += size) {
        long end = at_most(row + size, row_end);
        for (long i = row; i < end; i += TILE)
            memset(sums[(i - row) / TILE], 0, (size_t)rows * sizeof sums[0][0]);
        for (long start = 0; start < part->columns; start += CHUNK)
            for (long i = row; i < end; i += TILE)
                times_form(x, part, i, start, at_most(CHUNK, part->columns - start), sums[(i - row) / TILE][0]);
        for (long i = row; i < end; i += TILE)
            for (long r = 0; r < x->count; r++) {
                float *mine = sums[(i - row) / TILE][r];
                long width = at_most(TILE, part->rows - i);
                for (long j = 0; job->bias && j < width; j++)
                    mine[j] += job->bias[at + i + j];
                narrow(mine, job->out, (int)job->out_bf16, (first + r) * job->out_stride + at + i, width);
            }
    }
}

/* Rows of x per task: whole panels, about equal for all tasks. */
INLINE long task_rows(const LinearJob *job)
{
    if (job->parts->interleaved)
        return DOT_ROWS;
    long tasks = (job->num_rows + TASK_ROWS - 1) / TASK_ROWS;
    return tasks ? ((job->num_rows + tasks - 1) / tasks + STEP - 1) / STEP * STEP : TASK_ROWS;
}
INLINE long row_tasks(const LinearJob *job) { return (job->num_rows + task_rows(job) - 1) / task_rows(job); }

static void run_task(const LinearJob *job, const Matrix *part, const uint8_t *prepared, long at, long unit, long end, long row)
{
    long row_end = at_most(row + task_rows(job), job->num_rows);
#if defined(DOT_NEON) || defined(DOT_X86)
    if (part->interleaved) {
        quire_dot_task(job, part, prepared, at, row, row_end, unit, end);
        return;
    }
#endif
    int panels = in_panels(job->num_rows);
    Rows x = {(const float *)job->x + row * job->x_stride, job->x_stride, row_end - row, panels};
    if (!is_read_as_it_is(job)) {
        x.stride = panels ? panel_columns(part->columns) : part->columns;
        x.x = (const float *)prepared + row * x.stride;
    }
    float_task(job, part, &x, at, row, unit * TILE, at_most(end * TILE, part->rows));
}

/* Divide a part into units of rows of the weight, several per task. Returns the number of tasks. */
INLINE long divide(const LinearJob *job, const Matrix *part, long *units, long *each)
{
    long size = part->interleaved ? UNIT_GROUPS * GROUP : TILE, work = size * part->row_bytes * (job->num_rows + !job->num_rows);
    *units = quotient(part->rows + size - 1, size);
    long least = part->interleaved ? TASK_UNITS : tiles_at_once(in_panels(job->num_rows));
    long wanted = work > TASK_BYTES ? 0 : quotient(TASK_BYTES, work);
    long threads = omp_get_num_threads(), tasks = *units;
    if (part->interleaved && least > 1 && *units >= 16 * least * threads)
        least *= 2;
    if (!part->interleaved)
        tasks *= row_tasks(job);
    *each = at_most(wanted > least ? wanted : least, quotient(tasks, SHARES * threads));
    *each += !*each;
    return quotient(*units + *each - 1, *each) * row_tasks(job);
}

long quire_linear_tasks(const LinearJob *job)
{
    long tasks = 0, units, each;
    for (long p = 0; p < job->num_parts; p++)
        tasks += divide(job, job->parts + p, &units, &each);
    return tasks;
}

void quire_linear_task(const LinearJob *job, const uint8_t *prepared, long task)
{
    const Matrix *part = job->parts;
    long at = 0, units, each, rows_of_tasks = row_tasks(job);
    for (long mine; task >= (mine = divide(job, part, &units, &each)); part++) {
        task -= mine;
        at += part->rows;
    }
    long of_units = quotient(task, rows_of_tasks), unit = of_units * each, of_rows = task - of_units * rows_of_tasks;
    run_task(job, part, prepared, at, unit, at_most(unit + each, units), of_rows * task_rows(job));
}

void quire_linear(const LinearJob *job)
{
    uint8_t *prepared = job->scratch;
    long rows = quire_linear_rows(job), tasks = quire_linear_tasks(job);
    if (rows == 1 && omp_get_num_threads() <= job->scratch_copies) {
        prepared += omp_get_thread_num() * job->scratch_bytes;
        quire_linear_prepare(job, 0, prepared);
    } else if (rows) {
        long each = quire_linear_together(job);
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row += each)
            quire_linear_prepare_some(job, row, each, prepared);
    }
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < tasks; task++)
        quire_linear_task(job, prepared, task);
}
