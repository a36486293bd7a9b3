/* Measuring all-reduces among threads of one process. */
#include <dirent.h>
#include <math.h>

#include "runtime/comm/comm.h"
#include "tests/test.h"

static int open_files(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    REQUIRE(folder != NULL);
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

/* Again where it was not below the limit: what runs beside makes it longer, never shorter. */
static double measured_below(ml_status (*measure)(double *seconds), double limit) {
    double seconds = INFINITY;
    for (int i = 0; i < 10 && seconds >= limit; i++) REQUIRE(measure(&seconds) == ML_OK);
    return seconds;
}

static ml_status measure_few(double *seconds) {
    return ml_comm_measure_sum(2, 16, seconds);
}

static ml_status measure_wait(double *seconds) {
    return ml_comm_measure_wait(2, 1e-4, seconds);
}

TEST(comm, measured_sums) {
    double few = 0, many = 0, of_four = 0;
    int before = open_files();
    CHECK(ml_comm_measure_sum(2, 1 << 18, &many) == ML_OK);
    CHECK(ml_comm_measure_sum(4, 16, &of_four) == ML_OK);
    few = measured_below(measure_few, many);
    CHECK(few > 1e-7 && of_four > 1e-7);
    CHECK(many > 20e-6 && many > few); /* 1 MiB at 50 GB/s, whatever runs beside */
    CHECK(open_files() == before);
    few = measured_below(measure_wait, 0.1);
    CHECK(few > 0 && few < 0.1);
    CHECK_STATUS(ml_comm_measure_wait(1, 1e-4, &few), ML_INTERNAL);
    CHECK_STATUS(ml_comm_measure_sum(1, 16, &few), ML_INTERNAL);
    CHECK_STATUS(ml_comm_measure_sum(9, 16, &few), ML_INTERNAL);
}

/* Threads as ranks hold no locks of their own, so no rank reports another as dead: measured for
 * 0.8 s, which is longer than the first check of the locks. */
TEST(comm, measured_for_long) {
    double seconds = 0;
    CHECK_STATUS(ml_comm_measure_wait(2, 0.035, &seconds), ML_OK);
    CHECK(seconds > 0);
}
