/* Conversion of the blocks of a GGUF file to the formats of the GEMM kernels, and of single rows to floats. */
#include "half.h"

/* ggml types; equal to the numbers in cpu/gguf.py. Types with a grid are first converted by gguf_grid.py to blocks of 32 columns:
 * two floats and 16 bytes of codes. NVFP4 weights come in the same blocks. */
enum {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, IQ4_NL, MXFP4, GRID_IQ2, GRID_IQ3_XXS, GRID_IQ3_S, NVFP4
};

typedef struct {
    uint8_t *into;
    const uint8_t *from;
    int64_t type, form, rows, columns, interleaved, from_row_bytes, head_shift;
} PackJob;

typedef struct {
    void *out;
    const int64_t *ids;
    const Matrix *matrix;
    int64_t num_ids, out_bf16;
} RowsJob;

/* 32 columns: scale * code + low. 8-bit codes are signed; byte i of 4-bit codes holds columns i and 16 + i. `halves` are scale
 * and low as stored. */
typedef struct {
    uint8_t codes[BLOCK];
    float scale[2], low[2];
    uint8_t halves[4];
} Block;

static const int SUPER_BYTES[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 136, 18, 17, 24, 24, 24, 24};

/* Rows per group of the interleaved layout; 0 if this CPU does not support it. */
int quire_group(void)
{
#if defined(DOT_NEON) || defined(DOT_X86)
    return GROUP;
#else
    return 0;
#endif
}

/* Whether runs of blocks of the interleaved layout may share their scales and lows. */
int quire_shares_heads(void)
{
#ifdef DOT_X86
    return 1;
#else
    return 0;
#endif
}

/* Pack 4-bit codes from one per byte to two per byte. */
INLINE void pair(Block *into)
{
    for (int i = 0; i < 16; i++)
        into->codes[i] |= (uint8_t)(into->codes[i + 16] << 4);
}

INLINE void five_bits(const uint8_t *from, int low, uint8_t *codes)
{
    uint32_t fifth;
    memcpy(&fifth, from, 4);
    for (int i = 0; i < BLOCK; i++) {
        int code = i < 16 ? from[4 + i] & 15 : from[4 + i - 16] >> 4;
        codes[i] = (uint8_t)((code | (int)(fifth >> i & 1) << 4) - low);
    }
}

/* Read a block of 32 columns with a float16 scale, and a float16 low if the type has one. */
INLINE void read_small(int type, const uint8_t *from, Block *into)
{
    int low = type == Q4_1 || type == Q5_1;
    memcpy(into->halves, from, 4);
    into->scale[0] = from_half(from);
    into->low[0] = low ? from_half(from + 2) : 0;
    from += low ? 4 : 2;
    if (type == Q5_0 || type == Q5_1)
        five_bits(from, low ? 0 : 16, into->codes);
    else
        memcpy(into->codes, from, type == Q8_0 ? 32 : 16);
}

/* Read a block of MXFP4: one byte of a scale, then 16 bytes of codes. */
INLINE void read_mxfp4(const uint8_t *from, Block *into)
{
    into->halves[0] = from[0];
    memcpy(into->codes, from + 1, 16);
}

/* The 6-bit scale and minimum of block `b` of Q4_K and Q5_K. */
INLINE void six_bits(const uint8_t *from, int b, int *scale, int *low)
{
    if (b < 4) {
        *scale = from[b] & 63;
        *low = from[b + 4] & 63;
    } else {
        *scale = (from[b + 4] & 15) | (from[b - 4] >> 6) << 4;
        *low = from[b + 4] >> 4 | (from[b] >> 6) << 4;
    }
}

INLINE void read_q4_q5(int type, const uint8_t *from, int b, Block *into)
{
    const uint8_t *codes = from + (type == Q4_K ? 16 : 48) + b / 2 * 32, *fifth = from + 16;
    int scale, low;
    six_bits(from + 4, b, &scale, &low);
    into->scale[0] = from_half(from) * (float)scale;
    into->low[0] = -(from_half(from + 2) * (float)low);
    for (int i = 0; i < BLOCK; i++) {
        into->codes[i] = b & 1 ? codes[i] >> 4 : codes[i] & 15;
        if (type == Q5_K)
            into->codes[i] |= (uint8_t)((fifth[i] >> b & 1) << 4);
    }
    if (type == Q4_K)
        pair(into);
}

INLINE void read_q2(const uint8_t *from, int b, Block *into)
{
    for (int h = 0; h < 2; h++) {
        into->scale[h] = from_half(from + 80) * (float)(from[2 * b + h] & 15);
        into->low[h] = -(from_half(from + 82) * (float)(from[2 * b + h] >> 4));
    }
    for (int i = 0; i < BLOCK; i++)
        into->codes[i] = from[16 + b / 4 * 32 + i] >> b % 4 * 2 & 3;
    pair(into);
}

INLINE void read_q3(const uint8_t *from, int b, Block *into)
{
    const uint8_t *scales = from + 96;
    for (int h = 0; h < 2; h++) {
        int s = 2 * b + h, high = scales[8 + s % 4] >> s / 4 * 2 & 3;
        int scale = ((s < 8 ? scales[s] & 15 : scales[s - 8] >> 4) | high << 4) - 32;
        into->scale[h] = from_half(from + 108) * (float)scale;
        into->low[h] = -4 * into->scale[h];
    }
    for (int i = 0; i < BLOCK; i++)
        into->codes[i] = (uint8_t)((from[32 + b / 4 * 32 + i] >> b % 4 * 2 & 3) | (from[i] >> b & 1) << 2);
    pair(into);
}

INLINE void read_q6(const uint8_t *from, int b, Block *into)
{
    const uint8_t *low = from + b / 4 * 64 + b % 2 * 32, *high = from + 128 + b / 4 * 32;
    for (int h = 0; h < 2; h++)
        into->scale[h] = from_half(from + 208) * (float)(int8_t)from[192 + 2 * b + h];
    for (int i = 0; i < BLOCK; i++) {
        int code = b % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        into->codes[i] = (uint8_t)((code | (high[i] >> b % 4 * 2 & 3) << 4) - 32);
    }
}

INLINE void read_iq4_xs(const uint8_t *from, int b, Block *into)
{
    int scale = (from[4 + b / 2] >> b % 2 * 4 & 15) | (from[2 + b / 4] >> b % 4 * 2 & 3) << 4;
    into->scale[0] = from_half(from) * (float)(scale - 32);
    memcpy(into->codes, from + 8 + 16 * b, 16);
}

INLINE void read_iq4_nl(const uint8_t *from, Block *into)
{
    into->scale[0] = from_half(from);
    memcpy(into->codes, from + 2, 16);
}

/* Read a block of gguf_grid.py or of NVFP4: the two floats are the scales of both halves, or a scale and a low. */
INLINE void read_grid(const uint8_t *from, Block *into)
{
    memcpy(into->scale, from, 8);
    into->low[0] = into->scale[1];
    memcpy(into->codes, from + 8, 16);
}

INLINE void read_block(int type, const uint8_t *row, long b, Block *into)
{
    const uint8_t *from = row + (type < Q2_K || type > IQ4_XS ? b : b / 8) * SUPER_BYTES[type];
    switch (type) {
    case Q2_K: read_q2(from, b % 8, into); break;
    case Q3_K: read_q3(from, b % 8, into); break;
    case Q4_K: case Q5_K: read_q4_q5(type, from, b % 8, into); break;
    case Q6_K: read_q6(from, b % 8, into); break;
    case IQ4_XS: read_iq4_xs(from, b % 8, into); break;
    case IQ4_NL: read_iq4_nl(from, into); break;
    case MXFP4: read_mxfp4(from, into); break;
    case GRID_IQ2: case GRID_IQ3_XXS: case GRID_IQ3_S: case NVFP4: read_grid(from, into); break;
    default: read_small(type, from, into);
    }
}

/* Write head `i` of `block` to index `at` of an array of heads. */
INLINE void write_head(int form, const Block *block, int i, int low, uint8_t *heads, long at)
{
    if (form == E2M1)
        heads[at] = block->halves[0];
    else if (has_halves(form))
        memcpy(heads + 2 * at, block->halves + 2 * low, 2);
    else
        memcpy(heads + 4 * at, low ? &block->low[i] : &block->scale[i], 4);
}

INLINE void write_row_block(int form, const Block *block, uint8_t *row, long b, long blocks)
{
    long heads = blocks * heads_of(form);
    uint8_t *codes = row + heads * (has_low(form) + 1) * head_bytes(form) + b * code_bytes(form);
    for (int low = 0; low <= has_low(form); low++)
        for (int i = 0; i < heads_of(form); i++)
            write_head(form, block, i, low, row, low * heads + b * heads_of(form) + i);
    memcpy(codes, block->codes, (size_t)code_bytes(form));
}

/* Write a block of row `r` of a group: the scales and lows to `heads` and the codes to `codes`, both of the whole group. */
INLINE void write_interleaved(int form, const Block *block, uint8_t *heads, uint8_t *codes, int r)
{
    for (int low = 0; low <= has_low(form); low++)
        for (int i = 0; i < heads_of(form); i++)
            write_head(form, block, i, low, heads, (low * heads_of(form) + i) * GROUP + r);
    for (int i = 0; i < code_bytes(form); i += 4)
        memcpy(codes + i * GROUP + 4 * r, block->codes + i, 4);
}

INLINE void pack_row(int type, int form, const PackJob *job, long row)
{
    long blocks = job->columns / BLOCK, first = row / GROUP * blocks, shift = job->head_shift;
    Block block;
    for (long b = 0; b < blocks; b++) {
        if (row < job->rows)
            read_block(type, job->from + row * job->from_row_bytes, b, &block);
        else
            memset(&block, 0, sizeof block);
        if (job->interleaved)
            write_interleaved(form, &block, job->into + heads_at(form, shift, first + b), job->into + codes_at(form, shift, first + b),
                              row % GROUP);
        else
            write_row_block(form, &block, job->into + row * blocks * block_bytes(form), b, blocks);
    }
}

void quire_pack(const PackJob *job)
{
    long rows = job->interleaved ? (job->rows + GROUP - 1) / GROUP * GROUP : job->rows;
#pragma omp for schedule(static, 64)
    for (long row = 0; row < rows; row++)
        switch (job->type) {
        case Q4_0: pack_row(Q4_0, FOUR_H, job, row); break;
        case Q4_1: pack_row(Q4_1, FOUR_LOW_H, job, row); break;
        case Q5_0: pack_row(Q5_0, EIGHT_H, job, row); break;
        case Q5_1: pack_row(Q5_1, EIGHT_LOW_F, job, row); break;
        case Q8_0: pack_row(Q8_0, EIGHT_H, job, row); break;
        case Q2_K: pack_row(Q2_K, FOUR_LOW_F_16, job, row); break;
        case Q3_K: pack_row(Q3_K, FOUR_LOW_F_16, job, row); break;
        case Q4_K: pack_row(Q4_K, FOUR_LOW_F, job, row); break;
        case Q5_K: pack_row(Q5_K, EIGHT_LOW_F, job, row); break;
        case Q6_K: pack_row(Q6_K, EIGHT_F_16, job, row); break;
        case IQ4_XS: pack_row(IQ4_XS, IQ4_F, job, row); break;
        case IQ4_NL: pack_row(IQ4_NL, IQ4_F, job, row); break;
        case GRID_IQ2: pack_row(GRID_IQ2, IQ2_F_16, job, row); break;
        case GRID_IQ3_XXS: pack_row(GRID_IQ3_XXS, IQ3_F, job, row); break;
        case GRID_IQ3_S: pack_row(GRID_IQ3_S, FOUR_LOW_F, job, row); break;
        case NVFP4: pack_row(NVFP4, E2M1_F_16, job, row); break;
        default: pack_row(MXFP4, E2M1, job, row);
        }
}

INLINE float value_of(int form, float scale, float low, uint8_t code)
{
    if (has_table(form))
        return scale * (float)table_of(form)[code];
    if (!is_four(form))
        return scale * (float)(int8_t)code + low;
    return has_low(form) ? scale * (float)code + low : scale * (float)(code - 8);
}

/* Dequantize block `b` of a row. */
INLINE void unpack_block(const Matrix *matrix, long row, long b, float *into)
{
    int form = (int)matrix->form, each = heads_of(form), lows = has_low(form);
    long blocks = matrix->columns / BLOCK, width = BLOCK / each;
    const uint8_t *data = matrix->data, *heads, *codes;
    long step, stride, codes_step; /* stride of the heads of a block; offset from scales to lows; stride of 4 codes */
    if (matrix->interleaved) {
        b += row / GROUP * blocks;
        codes = data + codes_at(form, shift_of(form, matrix), b) + 4 * (row % GROUP);
        heads = data + heads_at(form, shift_of(form, matrix), b) + row % GROUP * head_bytes(form);
        step = GROUP;
        stride = GROUP * each;
        codes_step = 4 * GROUP;
    } else {
        heads = data + row * matrix->row_bytes;
        codes = heads + blocks * each * (lows + 1) * head_bytes(form) + b * code_bytes(form);
        heads += b * each * head_bytes(form);
        step = 1;
        stride = blocks * each;
        codes_step = 4;
    }
    for (int i = 0; i < BLOCK; i++) {
        int column = is_four(form) ? i % 16 : i;
        uint8_t code = codes[column / 4 * codes_step + column % 4];
        long at = i / width * step;
        if (is_four(form))
            code = i < 16 ? code & 15 : code >> 4;
        into[i] = value_of(form, read_head(form, heads, at), lows ? read_head(form, heads, stride + at) : 0, code);
    }
}

void quire_unpack(const Matrix *matrix, long row, long start, long num, float *into)
{
    for (long b = 0; b < num; b++)
        unpack_block(matrix, row, start + b, into + b * BLOCK);
}

static void plain_rows(const RowsJob *job)
{
    const Matrix *matrix = job->matrix;
    int form = (int)matrix->form;
    long columns = matrix->columns;
    float values[BLOCK], factor;
#pragma omp for schedule(static)
    for (long i = 0; i < job->num_ids; i++)
        for (long c = 0; c < columns; c += BLOCK) {
            long count = columns - c < BLOCK ? columns - c : BLOCK;
            read_factors(form, matrix, job->ids[i], c, count, &factor);
            widen_of(form, matrix->data, job->ids[i] * columns + c, count, factor, values);
            narrow(values, job->out, (int)job->out_bf16, i * columns + c, count);
        }
}

/* Dequantize the rows `ids` of a matrix: [num_ids, columns]. */
void quire_rows(const RowsJob *job)
{
    const Matrix *matrix = job->matrix;
    if (!is_packed((int)matrix->form)) {
        plain_rows(job);
        return;
    }
    long blocks = matrix->columns / BLOCK;
    float values[BLOCK];
#pragma omp for schedule(static)
    for (long i = 0; i < job->num_ids * blocks; i++) {
        unpack_block(matrix, job->ids[i / blocks], i % blocks, values);
        narrow(values, job->out, (int)job->out_bf16, i * BLOCK, BLOCK);
    }
}
