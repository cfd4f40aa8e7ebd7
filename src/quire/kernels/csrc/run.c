/* One parallel region for any number of kernels.
 *
 * A kernel is called by every thread of the team with the same job. It shares the work with `omp for`, whose barrier
 * ends each phase, and returns when all of its results are written. It opens no region of its own and allocates
 * nothing.
 */
#include <stdint.h>

typedef void Kernel(const void *job);

void quire_run(Kernel *const *kernels, const void *const *jobs, int64_t count, int64_t num_threads)
{
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < count; i++)
        kernels[i](jobs[i]);
}
