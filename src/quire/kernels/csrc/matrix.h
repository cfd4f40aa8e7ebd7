/* Shared declarations of the GEMM kernels: formats of a weight, and the job. */
#ifndef QUIRE_MATRIX_H
#define QUIRE_MATRIX_H

#include "simd.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#define BLOCK 32 /* columns per block */

/* Kernels for interleaved weights: NEON (gguf.c), AVX2 or AVX-512 (gguf_x86.c), or none. GROUP: rows per group of the
 * interleaved layout. UNIT_GROUPS: groups that are computed together. PANEL: rows of x per panel in scratch memory, used from
 * that many rows on. DOT_ROWS: maximum rows of x per task. */
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

/* Formats of a weight; equal to the numbers in cpu/gguf.py and cpu/linear.py. The value of a 4-bit or 8-bit code is scale * code +
 * low, with a scale and optionally a low per 32 columns (per 16 in the formats _16), as float16 (H) or float (F). E4M3 and E5M2
 * are fp8 with the `scales` of the matrix. Codes of the last formats index a table: E2M1 is a 4-bit float with a power of two in
 * one byte as its scale; E2M1_F_16 has two floats; the others are types of
 * llama.cpp. */
enum {
    F32, BF16, FOUR_H, FOUR_LOW_H, EIGHT_H, FOUR_LOW_F, EIGHT_LOW_F, FOUR_LOW_F_16, EIGHT_F_16, E4M3, E5M2, E2M1, IQ2_F_16, IQ3_F,
    IQ4_F, E2M1_F_16
};

/* Values of 4-bit codes of the last formats; those of E2M1 and E2M1_F_16 are doubled. */
static const int8_t TABLES[][16] = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0},
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
INLINE int has_table(int form) { return form >= E2M1; }
INLINE const int8_t *table_of(int form) { return TABLES[form - E2M1]; }

INLINE int is_fp8(int form) { return form == E4M3 || form == E5M2; }
INLINE int is_packed(int form) { return form >= FOUR_H && !is_fp8(form); }
INLINE long plain_bytes(int form) { return form == F32 ? 4 : form == BF16 ? 2 : 1; }
INLINE int is_four(int form)
{
    return form == FOUR_H || form == FOUR_LOW_H || form == FOUR_LOW_F || form == FOUR_LOW_F_16 || has_table(form);
}
INLINE int is_small(int form) { return is_four(form) && form <= E2M1; } /* values of codes are at most 15 */
INLINE int has_low(int form) { return form == FOUR_LOW_H || form == FOUR_LOW_F || form == EIGHT_LOW_F || form == FOUR_LOW_F_16; }
INLINE int has_halves(int form) { return form == FOUR_H || form == FOUR_LOW_H || form == EIGHT_H; }
/* Scales per block. */
INLINE int heads_of(int form)
{
    return form == FOUR_LOW_F_16 || form == EIGHT_F_16 || form == IQ2_F_16 || form == E2M1_F_16 ? 2 : 1;
}
INLINE long head_bytes(int form) { return has_halves(form) ? 2 : form == E2M1 ? 1 : 4; }
INLINE long code_bytes(int form) { return is_four(form) ? BLOCK / 2 : BLOCK; }
/* Bytes of the scales and lows of a block of one row. */
INLINE long heads_bytes(int form) { return heads_of(form) * (has_low(form) + 1) * head_bytes(form); }
/* Bytes of a block of one row. */
INLINE long block_bytes(int form) { return heads_bytes(form) + code_bytes(form); }

/* A matrix [rows, columns]. In the row layout, a row of a packed format has the scales, the lows and the codes of all its
 * blocks. In the interleaved layout, a block of a group has the scales and lows (GROUP of each) and the codes, alternating 4
 * bytes of each row; the last group is zero-padded. There, runs of 2^head_shift blocks may have the same scales and lows, which are
 * stored once, before the codes of the run. 4-bit codes: byte i of a block holds column i in its low nibble and column
 * 16 + i in its high nibble. */
typedef struct {
    const void *data;
    int64_t form, rows, columns, interleaved, row_bytes; /* row_bytes: stride of a row, if not interleaved */
    const float *scales;                /* of fp8: one per block of scale_rows and scale_columns; */
    int64_t scale_rows, scale_columns; /* scale_columns: a multiple of BLOCK, or all columns */
    int64_t head_shift;
} Matrix;

/* head_shift of a matrix: only two formats on x86 have another than 0, so that it is a constant for all others. */
INLINE long shift_of(int form, const Matrix *matrix)
{
#ifdef DOT_X86
    return form == FOUR_H || form == FOUR_LOW_H ? matrix->head_shift : 0;
#else
    return 0;
#endif
}

/* Offsets in bytes of the scales and lows, and of the codes, of block `b` in the interleaved layout. */
INLINE long heads_at(int form, long shift, long b)
{
    return (b >> shift) * GROUP * (heads_bytes(form) + (code_bytes(form) << shift));
}
INLINE long codes_at(int form, long shift, long b)
{
    return heads_at(form, shift, b) + GROUP * (heads_bytes(form) + (b & ((1 << shift) - 1)) * code_bytes(form));
}

typedef struct {
    void *out, *scratch;
    const void *x;
    const float *bias;     /* or NULL */
    const Matrix *parts;   /* their outputs are concatenated */
    const int32_t *x_rows; /* indices of the rows of x; NULL: consecutive */
    int64_t num_parts, num_rows, x_stride, out_stride, x_bf16, out_bf16;
    int64_t scratch_copies, scratch_bytes; /* copies: threads with their own scratch memory */
} LinearJob;

/* Parts of quire_linear, for kernels that run several GEMMs in one parallel region. */

/* Rows of x to prepare, including the padding of the last panel; 0 if x is read directly. */
long quire_linear_rows(const LinearJob *job);
/* Convert a row of x to the input format of the GEMM, at its position in `into`. Rows after the last row repeat the last row. */
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
    if (size < 0x400) /* subnormal */
        return sign * (float)size / 16777216.0f;
    wide = size < 0x7c00 ? (size + (112 << 10)) << 13 : (size & 0x3ff) << 13 | 0x7f800000;
    memcpy(&value, &wide, 4);
    return sign * value;
#endif
}

/* Half of the power of two that a byte encodes. */
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

/* A row of a matrix in the row layout. Rows after the last row repeat the last row. */
INLINE const uint8_t *row_at(const Matrix *part, long row)
{
    return (const uint8_t *)part->data + at_most(row, part->rows - 1) * part->row_bytes;
}

/* 32 quantized columns of a row of x: int16 codes, the scale, and the sums of all 32, the first 16 and the last 16 codes. */
#define ROUNDED_BYTES (2 * BLOCK + 16)

#ifdef DOT_X86
/* Quantize a row of x; `lanes` is the number of rows per panel. */
void quire_round_row(const float *x, long blocks, long lanes, uint8_t *into);
/* Quantize all rows of a panel. */
void quire_round_panel(const float *const *x, long blocks, uint8_t *into);
#else
void quire_round_row(const float *x, long blocks, uint8_t *into);
#endif
/* Rows [row, row_end) of x, at most DOT_ROWS, times units [unit, unit_end) of a part; its outputs begin at column `at`. */
void quire_dot_task(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long unit,
                    long unit_end);
/* Dequantize blocks [start, start + num) of a row of a packed matrix. */
void quire_unpack(const Matrix *matrix, long row, long start, long num, float *into);

#endif
