/* A process that times products waits for those that plan, and those that come then wait for it. */
#define _GNU_SOURCE
#include "vm/check/quiet.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "codegen/jit/jit.h"
#include "tests/test.h"

enum { PLANS = 1, PLANNED, TIMES, TIMED, SECOND_PLANS };

static void sleep_ms(int ms) {
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000L}, NULL);
}

static void wait_until(atomic_int *at, int state) {
    for (int i = 0; i < 5000 && atomic_load(at) < state; i++) sleep_ms(1);
}

static void first_planner(atomic_int *at) {
    quiet_plan();
    atomic_store(at, PLANS);
    sleep_ms(50); /* in which the other would begin, if it did not wait */
    int state = PLANS;
    _exit(atomic_compare_exchange_strong(at, &state, PLANNED) ? 0 : 1);
}

static void second_planner(atomic_int *at) {
    wait_until(at, TIMES);
    quiet_plan();
    int state = TIMED;
    _exit(atomic_compare_exchange_strong(at, &state, SECOND_PLANS) ? 0 : 1);
}

static void check_child(pid_t child) {
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(check, products_are_timed_while_none_plans) {
    static char folder[] = "/tmp/mlua-quiet-XXXXXX"; /* the options borrow it */
    char command[64];
    atomic_int *at =
        mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED && mkdtemp(folder) != NULL);
    ml_jit_set_options(&(ml_jit_options){.cache = folder});
    pid_t child[2] = {fork(), -1};
    if (child[0] == 0) first_planner(at);
    child[1] = fork();
    if (child[1] == 0) second_planner(at);
    wait_until(at, PLANS);
    quiet_begin();
    int state = PLANNED;
    CHECK(atomic_compare_exchange_strong(at, &state, TIMES));
    sleep_ms(50);
    state = TIMES;
    CHECK(atomic_compare_exchange_strong(at, &state, TIMED));
    quiet_end();
    for (int i = 0; i < 2; i++) check_child(child[i]);
    CHECK(atomic_load(at) == SECOND_PLANS);
    munmap(at, sizeof *at);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}
