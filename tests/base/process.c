/* Threads, signals and the end of a process; what dead ones left behind. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/command.h"
#include "runtime/base/crash.h"
#include "runtime/base/leftover.h"
#include "runtime/base/process.h"
#include "tests/test.h"

/* What `body` writes to stderr in a process of its own, and how that ends: 128 + a signal. */
static int in_process(void (*body)(void), char *text, size_t size) {
    FILE *errors = tmpfile();
    int status;
    REQUIRE(errors);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fileno(errors), STDERR_FILENO);
        body();
        _exit(99);
    }
    waitpid(pid, &status, 0);
    rewind(errors);
    text[fread(text, 1, size - 1, errors)] = 0;
    fclose(errors);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#if !defined(__SANITIZE_ADDRESS__) /* which reports crashes itself */
static void *fault(void *argument) {
    (void)argument;
    usleep(50000);
    raise(SIGSEGV);
    return NULL;
}

static void fault_beside(bool ending) {
    pthread_t thread;
    ml_crash_report();
    if (ending) ml_crash_ending();
    if (ml_process_thread(&thread, fault, NULL) != 0) _exit(98);
    usleep(300000);
    _exit(7);
}
static void fault_at_work(void) {
    fault_beside(false);
}
static void fault_at_the_end(void) {
    fault_beside(true);
}
static void fault_of_main(void) {
    ml_crash_report();
    ml_crash_ending();
    fault(NULL);
}

/* A thread that is left in a library fails in silence while the process ends, and not before. */
TEST(base, faults_at_the_end) {
    char text[4096];
    CHECK_EQ_INT(in_process(fault_at_work, text, sizeof text), 128 + SIGSEGV);
    CHECK(strstr(text, "please report it") != NULL);
    CHECK_EQ_INT(in_process(fault_at_the_end, text, sizeof text), 7);
    CHECK_TEXT(text, "");
    CHECK_EQ_INT(in_process(fault_of_main, text, sizeof text), 128 + SIGSEGV);
    CHECK(strstr(text, "please report it") != NULL);
}
#endif

static void *write_to_closed_end(void *argument) {
    int ends[2];
    if (pipe(ends) != 0) return NULL;
    close(ends[0]);
    *(bool *)argument = write(ends[1], "", 1) < 0 && errno == EPIPE;
    close(ends[1]);
    return NULL;
}

/* In the main thread, in another one, and with an output that is not read. */
static void write_in_vain(void) {
    pthread_t thread;
    bool failed = false;
    ml_process_begin();
    write_to_closed_end(&failed);
    if (!failed) _exit(1);
    failed = false;
    if (ml_process_thread(&thread, write_to_closed_end, &failed) != 0) _exit(2);
    pthread_join(thread, NULL);
    if (!failed) _exit(3);
    int ends[2];
    if (pipe(ends) != 0 || dup2(ends[1], STDOUT_FILENO) < 0) _exit(4);
    close(ends[0]);
    write_to_closed_end(&failed);
}

TEST(base, connections_to_closed_ends) {
    char text[256];
    CHECK_EQ_INT(in_process(write_in_vain, text, sizeof text), 128 + SIGPIPE);
}

static void say_cleaned(void) {
    fputs("cleaned\n", stderr);
}
static void end_twice(void) {
    ml_process_at_end(say_cleaned);
    ml_process_clean();
    ml_process_clean();
    exit(0);
}
static void end_normally(void) {
    ml_process_at_end(say_cleaned);
    exit(0);
}

TEST(base, cleaned_once) {
    char text[256];
    CHECK_EQ_INT(in_process(end_twice, text, sizeof text), 0);
    CHECK_TEXT(text, "cleaned\n");
    CHECK_EQ_INT(in_process(end_normally, text, sizeof text), 0);
    CHECK_TEXT(text, "cleaned\n");
}

/* ---- Leftovers ---------------------------------------------------------------------------------
 */

static void make_folder(const char *folder, const char *prefix, const char *tag, char path[512]) {
    char file[600];
    snprintf(path, 512, "%s/%s%s-x", folder, prefix, tag);
    REQUIRE(mkdir(path, 0700) == 0);
    snprintf(file, sizeof file, "%s/entry", path);
    fclose(fopen(file, "w"));
}

TEST(base, leftovers) {
    char folder[] = "/tmp/mlua-left-XXXXXX", own[ML_LEFTOVER_TAG], dead[ML_LEFTOVER_TAG];
    char elsewhere[ML_LEFTOVER_TAG], path[4][512], command[64];
    REQUIRE(mkdtemp(folder));
    ml_leftover_tag(own);
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    waitpid(pid, NULL, 0);
    snprintf(dead, sizeof dead, "%.17s%d-00000000", own, (int)pid);
    snprintf(elsewhere, sizeof elsewhere, "%s", dead);
    elsewhere[3] = elsewhere[3] == '0' ? '1' : '0'; /* another machine */
    CHECK(ml_leftover_is_dead(dead));
    CHECK(!ml_leftover_is_dead(own));
    CHECK(!ml_leftover_is_dead(elsewhere));
    CHECK(!ml_leftover_is_dead("test-abcdef") && !ml_leftover_is_dead(""));
    make_folder(folder, "mlua-", dead, path[0]);
    make_folder(folder, "mlua-", own, path[1]);
    make_folder(folder, "mlua-", elsewhere, path[2]);
    make_folder(folder, "other-", dead, path[3]);
    char link[512];
    snprintf(link, sizeof link, "%s/mlua-%s-link", folder, dead);
    REQUIRE(symlink(path[3], link) == 0); /* is not followed */
    ml_leftover_remove_folders(folder, "mlua-");
    CHECK(access(path[0], F_OK) != 0);
    for (int i = 1; i < 4; i++) {
        char file[600];
        snprintf(file, sizeof file, "%s/entry", path[i]);
        CHECK(access(file, F_OK) == 0);
    }
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    CHECK_EQ_INT(system(command), 0);
}

/* ---- Commands ---------------------------------------------------------------------------------
 */

static int run(const char *script, unsigned stops) {
    const char *const words[] = {"/bin/sh", "-c", script, NULL};
    const ml_command command = {
        .words = words, .out = "/dev/null", .errors = "/dev/null", .stops = stops};
    return ml_command_run(&command);
}

static void *stop_soon(void *argument) {
    (void)argument;
    usleep(200000);
    ml_command_stop();
    return NULL;
}

TEST(base, commands) {
    static const char *const nowhere[] = {"/no/such/command", NULL};
    const ml_command none = {
        .words = nowhere, .out = "/dev/null", .errors = "/dev/null", .stops = ml_command_stops()};
    unsigned before = ml_command_stops();
    pthread_t thread;
    CHECK_EQ_INT(run("exit 0", before), 0);
    CHECK_EQ_INT(run("exit 3", before), 3);
    CHECK_EQ_INT(run("kill -SEGV $$", before), -SIGSEGV);
    CHECK_EQ_INT(ml_command_run(&none), ML_COMMAND_NOT_STARTED);
    REQUIRE(ml_process_thread(&thread, stop_soon, NULL) == 0);
    CHECK_EQ_INT(run("sleep 100 & sleep 100", before), -SIGTERM);
    pthread_join(thread, NULL);
    CHECK_EQ_INT(run("exit 0", before), -SIGTERM); /* decided upon before the stop */
    CHECK_EQ_INT(run("exit 0", ml_command_stops()), 0);
}
