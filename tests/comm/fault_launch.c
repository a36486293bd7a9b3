/* `mlua run -n` as a process: what it passes on, how it ends, and that nothing stays behind. The
 * test program itself is launcher and rank: with COMM_TEST in its environment it never gets to
 * main.
 */
#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/comm/comm_internal.h"
#include "tests/comm/support.h"
#include "tests/test.h"

enum { RANKS = 3, ORPHANS = 900 }; /* their list in /proc is larger than a page */

/* ---- The other side: launcher and ranks -------------------------------------------------------
 */

static int act(ml_comm *comm, const char *mode) {
    int rank = ml_comm_rank(comm), sum = rank;
    ml_comm_note(comm, "step 1, gpt.lua:7");
    const int orphans = !strcmp(mode, "orphan") ? 1 : !strcmp(mode, "orphans") ? ORPHANS : 0;
    for (int i = 0; i < orphans && rank == 1; i++) {
        ml_comm_progress(comm); /* a fork under sanitizers takes milliseconds */
        if (fork() != 0) continue;
        fprintf(stderr, "pid %d\n", (int)getpid());
        close(STDERR_FILENO);
        for (;;) sleep(100);
    }
    if (orphans) usleep(100000);
    if (!strcmp(mode, "kill") && rank == 1) raise(SIGKILL);
    if (!strcmp(mode, "stop") && rank == 1) raise(SIGSTOP);
    if (!strcmp(mode, "exit") && rank == 1) return 9;
    bool late = !strcmp(mode, "late error");
    if ((late || !strcmp(mode, "error")) && rank == 2) {
        if (ml_comm_fail(comm, "no such file")) fprintf(stderr, "gpt.lua:3: no such file\n");
        if (late) usleep(3500000); /* a GPU is given back */
        return 7;
    }
    if (!strcmp(mode, "slow error") && rank == 2) {
        if (ml_comm_fail(comm, "no such file")) fprintf(stderr, "gpt.lua:3: no such file\n");
        for (;;) sleep(100);
    }
    ml_status status = ml_comm_collect(ml_comm_everyone(comm), ML_COLLECTIVE_ALL_REDUCE, &sum, &sum,
                                       1, ML_I32, ML_COMBINE_SUM);
    if (!strcmp(mode, "wait")) {
        fprintf(stderr, "waits\n");
        for (;;) sleep(100);
    }
    if (status == ML_OK) {
        printf("rank %d has %d\n", rank, sum);
        fprintf(stderr, "threads %d, no rank: %d", ml_knobs()->threads, !getenv("MLUA_RANK"));
        return 0;
    }
    if (ml_comm_fail(comm, ml_error_last()->text)) fprintf(stderr, "%s\n", ml_error_last()->text);
    return ml_comm_peer_failed() ? ML_EXIT_PEER : 1;
}

__attribute__((constructor)) static void be_launcher_or_rank(int count, char **arguments) {
    const char *mode = getenv("COMM_TEST");
    ml_launch launch;
    ml_comm *comm;
    if (!mode || count < 1) return;
    if (!ml_launch_detect(&launch)) _exit(ml_launch_local(RANKS, &launch.options, arguments));
    dprintf(STDERR_FILENO, "pid %d\n", (int)getpid());
    if (!strcmp(mode, "early") && launch.rank == 1) _exit(5);
    if (!strcmp(mode, "early stop") && launch.rank == 1) raise(SIGSTOP);
    int code = 1;
    if (ml_comm_open(&launch, &comm) == ML_OK) {
        code = act(comm, mode);
        ml_comm_close(comm);
    } else if (ml_comm_peer_failed()) {
        code = ML_EXIT_PEER;
    }
    fflush(NULL);
    _exit(code);
}

/* ---- This side --------------------------------------------------------------------------------
 */

static const char *this_program(ml_arena *arena) {
    char path[1024];
    ssize_t size = readlink("/proc/self/exe", path, sizeof path - 1);
    return ml_arena_copy(arena, path, size > 0 ? (size_t)size : 0);
}

/* Every process that printed its pid in `text` must have ended; their count. */
static int check_ended(const char *text) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, "pid ")); at += 4) {
        int pid = atoi(at + 4);
        if (pid > 0 && (at == text || at[-1] != '(')) count++;
        for (int i = 0; pid > 0 && i < 500 && kill(pid, 0) == 0; i++) usleep(10000);
        EXPECT(!(pid > 0 && kill(pid, 0) == 0), "process %d stays behind", pid);
    }
    return count;
}

/* Runs a job in `mode`; its output, in which it must say each of the words. */
static char *check_mode(ml_arena *arena, const char *mode, int expected_code, int pids,
                        const char *const *words) {
    int code;
    char *text =
        test_command(arena,
                     ml_arena_format(arena, "COMM_TEST='%s' MLUA_TIMEOUT=%d %s", mode,
                                     strncmp(mode, "late", 4) == 0 ? 5 : 2, this_program(arena)),
                     &code);
    EXPECT(code == expected_code, "mode %s ends with %d, not %d:\n%s", mode, code, expected_code,
           text);
    int reported = check_ended(text);
    EXPECT(reported == pids, "mode %s: %d processes, not %d:\n%s", mode, reported, pids, text);
    for (; *words; words++)
        EXPECT(strstr(text, *words), "mode %s does not say \"%s\":\n%s", mode, *words, text);
    return text;
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void in_arena(void (*body)(void *)) {
    ml_arena *arena = ml_arena_new();
    REQUIRE(arena);
    ml_status status = ml_protect(body, arena);
    ml_error error = *ml_error_last();
    ml_arena_free(arena);
    EXPECT(status == ML_OK, "%s", error.text);
}

static void output(void *arena) {
    char *text = check_mode(arena, "good", 0, RANKS,
                            WORDS("rank 0 has 3\n", "[rank 1] threads ", "[rank 2] threads ",
                                  "no rank: 1\n", "[rank 1] pid "));
    CHECK(!strstr(text, "[rank 0]"));
    CHECK(!strstr(text, "rank 1 has")); /* what others print is not seen */
}
TEST(fault, launcher_output) {
    in_arena(output);
}

static void killed(void *arena) {
    char *text = check_mode(arena, "kill", 128 + SIGKILL, RANKS,
                            WORDS("mlua: rank 1 (pid ", "was killed by signal 9 (Killed); last "
                                                        "seen in: step 1, gpt.lua:7"));
    CHECK(strstr(text, "killed by") && !strstr(strstr(text, "killed by") + 1, "killed by"));
}
TEST(fault, launcher_killed_rank) {
    in_arena(killed);
}

static void stopped(void *arena) {
    check_mode(arena, "stop", ML_EXIT_PEER, RANKS,
               WORDS("mlua: rank 1 (pid ", "has been stopped or frozen", "gpt.lua:7"));
    check_mode(arena, "early stop", ML_EXIT_PEER, RANKS, WORDS("mlua: rank 1 (pid "));
}
TEST(fault, launcher_stopped_rank) {
    in_arena(stopped);
}

static void failing(void *arena) {
    char *text = check_mode(arena, "error", 7, RANKS,
                            WORDS("[rank 2] gpt.lua:3: no such file\n", "mlua: rank 2 failed"));
    CHECK(!strstr(text, "[rank 1] gpt"));
    check_mode(arena, "slow error", 1, RANKS,
               WORDS("[rank 2] gpt.lua:3: no such file\n", "mlua: rank 2 failed"));
    check_mode(arena, "late error", 7, RANKS, WORDS("mlua: rank 2 failed; the other ranks"));
    check_mode(arena, "exit", 9, RANKS, WORDS("rank 1 (pid "));
    check_mode(arena, "early", 5, RANKS, WORDS("rank 1 (pid ", "ended with exit code 5"));
}
TEST(fault, launcher_failing_rank) {
    in_arena(failing);
}

static void orphan(void *arena) {
    check_mode(arena, "orphan", 0, RANKS + 1, WORDS("rank 0 has 3"));
    check_mode(arena, "orphans", 0, RANKS + ORPHANS, WORDS("rank 0 has 3"));
}
TEST(fault, launcher_leaves_no_orphans) {
    in_arena(orphan);
}

/* Once all ranks wait, the launcher gets the signal. */
static void signal_once(void *argument, const char *output) {
    int *number = argument, waiting = 0;
    const char *launcher = strstr(output, "launcher ");
    for (const char *at = output; (at = strstr(at, "waits\n")); at++) waiting++;
    if (waiting < RANKS || !launcher || *number == 0) return;
    kill(atoi(launcher + strlen("launcher ")), *number);
    *number = 0;
}

/* Its exit code or 128 + signal, and no rank may stay. */
static void signal_launcher(ml_arena *arena, int number, int expected) {
    struct rusage used;
    int code;
    char *text = test_follow(arena,
                             ml_arena_format(arena, "COMM_TEST=wait %s & echo launcher $!; wait $!",
                                             this_program(arena)),
                             signal_once, &number, &code, &used);
    CHECK_EQ_INT(code, expected);
    EXPECT(check_ended(text) == RANKS, "not %d processes:\n%s", RANKS, text);
}
static void signals(void *arena) {
    signal_launcher(arena, SIGTERM, 128 + SIGTERM);
    signal_launcher(arena, SIGKILL, 128 + SIGKILL);
}
TEST(fault, launcher_signalled) {
    in_arena(signals);
}
