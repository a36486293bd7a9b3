/* The monotonic clock, and times that are measured by it. */
#ifndef ML_CLOCK_H
#define ML_CLOCK_H

#include <time.h>

/* Seconds since some moment of the past, the same for all processes of a host; never backwards.
 * Safe in signal handlers. */
double ml_clock_now(void);
/* A time of ml_clock_now as waits on CLOCK_MONOTONIC take it. */
struct timespec ml_clock_timespec(double seconds);
/* The median of at least one time, of an even number the mean of the middle two; it sorts them. */
double ml_clock_median(double *seconds, int count);

#endif
