/* What the products share: the forms of a weight, the job. */
#ifndef QUIRE_LINEAR_H
#define QUIRE_LINEAR_H

#include "simd.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#define BLOCK 32 /* columns that are stored together */

/* Whether and how this CPU multiplies interleaved weights: with NEON (gguf.c) or with AVX2 or AVX-512 (gguf_x86.c).
 * GROUP: rows that lie side by side in the interleaved layout. UNIT_GROUPS: groups that are computed together. PANEL: rows of x that
 * lie side by side in scratch, from so many rows on. DOT_ROWS: rows of x of a task, at most. */
#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)
#define DOT_NEON
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DOT_X86
#endif
#if defined(DOT_X86) && defined(__AVX512BW__)
#define GROUP 16
#else
#define GROUP 8
#endif
#ifdef DOT_X86
#define UNIT_GROUPS 2
#define PANEL 4
#define DOT_ROWS 128
#else
#define UNIT_GROUPS 1
#define PANEL 1
#define DOT_ROWS 128
#endif

/* How a weight is stored; the same numbers as in quantized.py. A code of 4 or 8 bits stands for scale * code + low,
 * with a scale and perhaps a low for 32 columns (for 16 in the forms _16), as float16 (H) or float (F). E4M3 and E5M2 are
 * floats of 8 bits that `scales` of the matrix belong to. A code of E2M1 is a float of 4 bits, its scale a power of two in
 * one byte. */
enum { F32, BF16, FOUR_H, FOUR_LOW_H, EIGHT_H, FOUR_LOW_F, EIGHT_LOW_F, FOUR_LOW_F_16, EIGHT_F_16, E4M3, E5M2, E2M1 };

/* Twice the numbers that codes of E2M1 stand for. */
static const int8_t E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE int is_fp8(int form) { return form == E4M3 || form == E5M2; }
INLINE int is_packed(int form) { return form >= FOUR_H && !is_fp8(form); }
INLINE long plain_bytes(int form) { return form == F32 ? 4 : form == BF16 ? 2 : 1; }
INLINE int is_four(int form)
{
    return form == FOUR_H || form == FOUR_LOW_H || form == FOUR_LOW_F || form == FOUR_LOW_F_16 || form == E2M1;
}
INLINE int has_low(int form) { return form == FOUR_LOW_H || form == FOUR_LOW_F || form == EIGHT_LOW_F || form == FOUR_LOW_F_16; }
INLINE int has_halves(int form) { return form == FOUR_H || form == FOUR_LOW_H || form == EIGHT_H; }
INLINE int heads_of(int form) { return form == FOUR_LOW_F_16 || form == EIGHT_F_16 ? 2 : 1; } /* in a block */
INLINE long head_bytes(int form) { return has_halves(form) ? 2 : form == E2M1 ? 1 : 4; }
INLINE long code_bytes(int form) { return is_four(form) ? BLOCK / 2 : BLOCK; }
/* Of one row. */
INLINE long block_bytes(int form) { return heads_of(form) * (has_low(form) + 1) * head_bytes(form) + code_bytes(form); }

/* A matrix [rows, columns]. In the layout of rows, a row of a packed form is the scales, the lows and the codes of all
 * its blocks. Interleaved, a block of a group is the scales, the lows (GROUP of each) and the codes, 4 bytes of each row in
 * turn; the last group is filled up with zeros. Codes of 4 bits: byte i of a block holds column i in its low and column
 * 16 + i in its high half. */
typedef struct {
    const void *data;
    int64_t form, rows, columns, interleaved, row_bytes; /* row_bytes: from a row to the next, if not interleaved */
    const float *scales;                /* of floats of 8 bits: one for each block of so many rows and columns; */
    int64_t scale_rows, scale_columns; /* a multiple of BLOCK, or all columns */
} Matrix;

typedef struct {
    void *out, *scratch;
    const void *x;
    const float *bias;     /* or NULL */
    const Matrix *parts;   /* their outputs lie side by side */
    const int32_t *x_rows; /* where the rows of x are; NULL: one after the other */
    int64_t num_parts, num_rows, x_stride, out_stride, x_bf16, out_bf16;
    int64_t scratch_copies, scratch_bytes; /* copies: threads that have scratch of their own */
} LinearJob;

/* The pieces of quire_linear, for kernels that share several products among their threads. */

/* Rows of x to prepare, those that fill up the last panel included; 0: x is read as it is. */
long quire_linear_rows(const LinearJob *job);
/* A row of x as the product reads it, at its place in `into`. Behind the last row comes the last again. */
void quire_linear_prepare(const LinearJob *job, long row, uint8_t *into);
long quire_linear_tasks(const LinearJob *job);
void quire_linear_task(const LinearJob *job, const uint8_t *prepared, long task);

INLINE float from_half(const uint8_t *at)
{
#if defined(__ARM_NEON) && defined(__aarch64__)
    __fp16 value;
    memcpy(&value, at, 2);
    return (float)value;
#elif defined(__F16C__)
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
#else
    uint32_t bits = (uint32_t)at[0] | (uint32_t)at[1] << 8, size = bits & 0x7fff, wide;
    float sign = bits >> 15 ? -1.0f : 1.0f, value;
    if (size < 0x400) /* below the normal numbers */
        return sign * (float)size / 16777216.0f;
    wide = size < 0x7c00 ? (size + (112 << 10)) << 13 : (size & 0x3ff) << 13 | 0x7f800000;
    memcpy(&value, &wide, 4);
    return sign * value;
#endif
}

/* Half of the power of two that a byte stands for. */
INLINE float half_power(uint8_t byte)
{
    uint32_t bits = byte < 2 ? 0x00200000u << byte : (uint32_t)(byte - 1) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float read_head(int form, const uint8_t *heads, long i)
{
    float value;
    if (has_halves(form))
        return from_half(heads + 2 * i);
    if (form == E2M1)
        return half_power(heads[i]);
    memcpy(&value, heads + 4 * i, 4);
    return value;
}

INLINE long at_most(long x, long most) { return x < most ? x : most; }

/* Of a matrix in the layout of rows. Behind the last row comes the last again. */
INLINE const uint8_t *row_at(const Matrix *part, long row)
{
    return (const uint8_t *)part->data + at_most(row, part->rows - 1) * part->row_bytes;
}

/* 32 columns of a row of x: whole numbers of 2 bytes, the scale, and the sums of all 32, the first 16 and the last 16 columns. */
#define ROUNDED_BYTES (2 * BLOCK + 16)

#ifdef DOT_X86
/* `lanes`: rows that lie side by side. */
void quire_round_row(const float *x, long blocks, long lanes, uint8_t *into);
/* All of them. */
void quire_round_panel(const float *const *x, long blocks, uint8_t *into);
#else
void quire_round_row(const float *x, long blocks, uint8_t *into);
#endif
/* Rows [row, row_end) of x, DOT_ROWS at most, times units [unit, unit_end) of a part whose outputs begin at column `at`. */
void quire_dot_task(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long unit,
                    long unit_end);
/* Blocks [start, start + num) of a row of a packed matrix as floats. */
void quire_unpack(const Matrix *matrix, long row, long start, long num, float *into);

#endif
