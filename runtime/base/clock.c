/* The monotonic clock, and times that are measured by it (clock.h). */
#include "runtime/base/clock.h"

#include <math.h>
#include <stdlib.h>

double ml_clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct timespec ml_clock_timespec(double seconds) {
    const double whole = floor(seconds);
    return (struct timespec){.tv_sec = (time_t)whole, .tv_nsec = (long)((seconds - whole) * 1e9)};
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double ml_clock_median(double *seconds, int count) {
    qsort(seconds, (size_t)count, sizeof *seconds, by_size);
    return (seconds[(count - 1) / 2] + seconds[count / 2]) / 2;
}
