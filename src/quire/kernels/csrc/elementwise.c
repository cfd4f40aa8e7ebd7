/* Operations of torch that tapes record: out = op(a, b) over up to DIMS dimensions with any strides, and means of rows. */
#include <math.h>

#include "activations.h"

#define DIMS 4
#define PIECE 64 /* elements that are computed at a time: whole vectors */

/* Operations, and types of elements; equal to the numbers in cpu/elementwise.py. Smaller numbers are those of activations.h. */
enum { COPY = 16, NEGATE, SQUARE, CUBE, RSQRT, TANH, SIGMOID, COS, SIN, ADD, SUBTRACT, MULTIPLY, DIVIDE };
enum { FLOAT32, BFLOAT16, INT64 };

typedef struct {
    void *out;
    const void *a, *b; /* b is NULL for operations with one argument or a number, `scalar` */
    int64_t op, out_type, a_type, b_type;
    int64_t size[DIMS], out_stride[DIMS], a_stride[DIMS], b_stride[DIMS]; /* in elements */
    double scalar;
} ElementwiseJob;

static void read_piece(const void *from, int64_t type, long at, long stride, long count, float *into)
{
    for (long i = 0; i < count; i++, at += stride)
        into[i] = type == FLOAT32    ? ((const float *)from)[at]
                  : type == BFLOAT16 ? from_bf16(((const uint16_t *)from)[at])
                                     : (float)((const int64_t *)from)[at];
}

static void write_piece(void *into, int64_t type, long at, long stride, long count, const float *from)
{
    for (long i = 0; i < count; i++, at += stride)
        if (type == FLOAT32)
            ((float *)into)[at] = from[i];
        else
            ((uint16_t *)into)[at] = to_bf16(from[i]);
}

#define EACH(value)                                                                                                              \
    for (long i = 0; i < PIECE; i++)                                                                                             \
        x[i] = value;                                                                                                            \
    break

static void apply(int64_t op, float *x, const float *y)
{
    switch (op) {
    case COPY: break;
    case NEGATE: EACH(-x[i]);
    case SQUARE: EACH(x[i] * x[i]);
    case CUBE: EACH(x[i] * x[i] * x[i]);
    case RSQRT: EACH(1.0f / sqrtf(x[i]));
    case TANH: EACH(tanhf(x[i]));
    case SIGMOID: EACH(1.0f / (1.0f + expf(-x[i])));
    case COS: EACH(cosf(x[i]));
    case SIN: EACH(sinf(x[i]));
    case ADD: EACH(x[i] + y[i]);
    case SUBTRACT: EACH(x[i] - y[i]);
    case MULTIPLY: EACH(x[i] * y[i]);
    case DIVIDE: EACH(x[i] / y[i]);
    default: activate_all((int)op, 0.0f, x, 0, NULL, 0, x, 0, PIECE, 0);
    }
}

void quire_elementwise(const ElementwiseJob *job)
{
    const int64_t *size = job->size;
    long columns = size[3], pieces = (columns + PIECE - 1) / PIECE;
#pragma omp for schedule(static)
    for (long task = 0; task < size[0] * size[1] * size[2] * pieces; task++) {
        long row = task / pieces, start = task % pieces * PIECE, left = columns - start, count = left < PIECE ? left : PIECE;
        long index[DIMS] = {row / size[2] / size[1], row / size[2] % size[1], row % size[2], start};
        long out = 0, a = 0, b = 0;
        float x[PIECE] = {0}, y[PIECE];
        for (int d = 0; d < DIMS; d++) {
            out += index[d] * job->out_stride[d];
            a += index[d] * job->a_stride[d];
            b += index[d] * job->b_stride[d];
        }
        for (long i = 0; i < PIECE; i++)
            y[i] = (float)job->scalar;
        read_piece(job->a, job->a_type, a, job->a_stride[3], count, x);
        if (job->b)
            read_piece(job->b, job->b_type, b, job->b_stride[3], count, y);
        apply(job->op, x, y);
        write_piece(job->out, job->out_type, out, job->out_stride[3], count, x);
    }
}

typedef struct {
    float *out;
    const float *x;
    int64_t rows, columns;
} MeanJob;

void quire_mean(const MeanJob *job)
{
#pragma omp for schedule(static)
    for (long row = 0; row < job->rows; row++) {
        const float *x = job->x + row * job->columns;
        vf sum = {0};
        for (long i = 0; i < job->columns; i += LANES)
            sum += take(x, 0, i, job->columns - i);
        job->out[row] = lanes_sum(sum) / (float)job->columns;
    }
}
