/* Dynamic time warping. The reference in numpy is `worker/multimodal/timestamps.py`.
 */
#include <math.h>
#include <stdint.h>

/* The same fields in the same order as in kernels/cpu/dtw.py. */
typedef struct {
    const double *costs; /* [tokens, states] */
    float *total;        /* [states + 1] cost of the best path to each state with the tokens so far */
    int8_t *came;        /* [tokens + 1, states + 1] last step of the path: both, token only, state only */
    int64_t *begins;     /* [tokens] */
    int64_t tokens, states;
} WarpJob;

void quire_warp(const WarpJob *job)
{
    long tokens = job->tokens, states = job->states, width = states + 1;
#pragma omp single
    {
        for (long state = 0; state <= states; state++)
            job->total[state] = state ? INFINITY : 0;
        for (long token = 1; token <= tokens; token++) {
            const double *costs = job->costs + (token - 1) * states;
            int8_t *came = job->came + token * width;
            float both = job->total[0], left = job->total[0] = INFINITY;
            for (long state = 1; state <= states; state++) {
                float up = job->total[state], least = left;
                int8_t by = 2;
                if (both < up && both < left)
                    least = both, by = 0;
                else if (up < both && up < left)
                    least = up, by = 1;
                both = up;
                came[state] = by;
                left = job->total[state] = (float)(costs[state - 1] + least);
            }
        }
        long state = states;
        for (long token = tokens; token > 0;) {
            int8_t by = state ? job->came[token * width + state] : 1;
            job->begins[token - 1] = state ? state - 1 : 0;
            token -= by != 2;
            state -= by != 1;
        }
    }
}
