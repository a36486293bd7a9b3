#define _GNU_SOURCE /* gettid */
#include "runtime/base/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
void ml_crash_report(void) {}
void ml_crash_ending(void) {}
#else
enum { FRAMES = 64, SECONDS = 5, STACK_BYTES = 64 << 10 };

static atomic_bool ending;

static void say(const char *text) {
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
}

/* Only what may be called in a handler, but for the first backtrace(), which may load a library:
 * where that never returns the alarm ends the process. */
static void on_fault(int number) {
    void *frames[FRAMES];
    while (atomic_load(&ending) && gettid() != getpid()) pause();
    signal(number, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    alarm(SECONDS);
    say("mlua: a fault of mlua itself or of a library below it; please report it with these calls, "
        "innermost first:\n");
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES), STDERR_FILENO);
    raise(number);
}

void ml_crash_ending(void) {
    atomic_store(&ending, true);
}

void ml_crash_report(void) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    static char stack[STACK_BYTES]; /* a stack that overflowed has no room for a handler */
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_ONSTACK | SA_NODEFER};
    sigaltstack(&other, NULL);
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigaction(faults[i], &action, NULL);
}
#endif
