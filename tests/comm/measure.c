/* Measuring all-reduces among threads of one process. */
#include <dirent.h>

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

TEST(comm, measured_sums) {
    double few = 0, many = 0, of_four = 0;
    int before = open_files();
    CHECK(ml_comm_measure_sum(2, 16, &few) == ML_OK);
    CHECK(ml_comm_measure_sum(2, 1 << 18, &many) == ML_OK);
    CHECK(ml_comm_measure_sum(4, 16, &of_four) == ML_OK);
    CHECK(few > 1e-7 && of_four > 1e-7);
    CHECK(many > 20e-6 && many > few); /* 1 MiB at 50 GB/s, whatever runs beside */
    CHECK(open_files() == before);
    CHECK(ml_comm_measure_wait(2, 1e-4, &few) == ML_OK);
    CHECK(few > 0 && few < 0.1);
    CHECK_STATUS(ml_comm_measure_wait(1, 1e-4, &few), ML_INTERNAL);
    CHECK_STATUS(ml_comm_measure_sum(1, 16, &few), ML_INTERNAL);
    CHECK_STATUS(ml_comm_measure_sum(9, 16, &few), ML_INTERNAL);
}
