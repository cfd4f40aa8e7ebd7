/* One parallel region for any number of kernels.
 *
 * Every thread of the team calls a kernel with the same job. The kernel divides the work with `omp for`, with a barrier at the
 * end of each phase, and returns when all of its results are written. It opens no parallel region and allocates no memory.
 */
#include <stdint.h>

typedef void Kernel(const void *job);

void quire_run(Kernel *const *kernels, const void *const *jobs, int64_t count, int64_t num_threads)
{
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < count; i++)
        kernels[i](jobs[i]);
}
