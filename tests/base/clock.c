/* Times and their medians. */
#include "runtime/base/clock.h"

#include "tests/test.h"

TEST(base, medians_of_times) {
    double one[] = {3}, even[] = {4, 1, 9, 2}, odd[] = {5, 1, 9, 2, 7};
    CHECK(ml_clock_median(one, 1) == 3);
    CHECK(ml_clock_median(even, 4) == 3);
    CHECK(ml_clock_median(odd, 5) == 5 && odd[0] == 1 && odd[4] == 9);
}

TEST(base, clock_times_as_waits_take_them) {
    const struct timespec at = ml_clock_timespec(12.25);
    CHECK(at.tv_sec == 12 && at.tv_nsec == 250000000);
    const double before = ml_clock_now();
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double between = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec, after = ml_clock_now();
    CHECK(before <= between && between <= after && after < before + 60);
}
