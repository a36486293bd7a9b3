#define _GNU_SOURCE /* pipe2 */
#include "runtime/base/command.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Descriptor 3 is a pipe that only this process can write to: it ends with it, and then `read`
 * returns. SIGTERM lets compilers remove their own temporary files. */
static const char guard[] = "export LC_ALL=C\n" /* what it prints is searched for causes */
                            "[ -z \"$4\" ] || export TMPDIR=\"$4\"\n"
                            "{ read -r line; trap '' TERM; kill -TERM 0; sleep 1; rm -rf \"$1\" "
                            "\"$2\" \"$3\" \"$4\"; kill -KILL 0; "
                            "} <&3 &\n"
                            "guard=$!\n"
                            "exec 3<&-\n"
                            "shift 4\n"
                            "\"$@\"\n"
                            "code=$?\n"
                            "exec 2>/dev/null\n" /* else a shell may print how the guard ends */
                            "kill -KILL $guard\n"
                            "wait $guard\n"
                            "exit $code\n";
enum { ALIVE = 3, MOST_WORDS = 64, MOST_RUNNING = 256, SHELL_SIGNAL = 128, NOT_FOUND = 126 };

static atomic_int running[MOST_RUNNING]; /* process groups; 0: free */
static atomic_uint stops;

unsigned ml_command_stops(void) {
    return atomic_load(&stops);
}

void ml_command_stop(void) {
    int before = errno;
    atomic_fetch_add(&stops, 1);
    for (int i = 0; i < MOST_RUNNING; i++) {
        int group = atomic_load(&running[i]);
        if (group > 0) kill(-group, SIGTERM);
    }
    errno = before;
}

static pid_t start(const ml_command *c, const char *const *words, int alive) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    pid_t child = 0;
    sigset_t none; /* threads of the pool block signals; a compiler should not */
    int create = O_WRONLY | O_CREAT | O_TRUNC;
    if (posix_spawn_file_actions_init(&actions) != 0) return 0;
    posix_spawn_file_actions_adddup2(&actions, alive, ALIVE);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, c->out, create, 0600);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, c->errors, create, 0600);
    sigemptyset(&none);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    int failed =
        posix_spawn(&child, "/bin/sh", &actions, &attributes, (char *const *)words, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return failed ? 0 : child;
}

/* Where it stands in `running`, or -1: too many run at once, and a stop does not reach this one. */
static int register_group(pid_t group) {
    for (int i = 0; i < MOST_RUNNING; i++) {
        int free = 0;
        if (atomic_compare_exchange_strong(&running[i], &free, (int)group)) return i;
    }
    return -1;
}

/* It is taken out of the list before its number can be that of another process. */
static int await(pid_t child, int place) {
    siginfo_t about;
    int state = -1;
    while (waitid(P_PID, (id_t)child, &about, WEXITED | WNOWAIT) != 0)
        if (errno != EINTR) break;
    if (place >= 0) atomic_store(&running[place], 0);
    while (waitpid(child, &state, 0) < 0)
        if (errno != EINTR) return ML_COMMAND_NOT_STARTED;
    if (!WIFEXITED(state)) return -WTERMSIG(state);
    int code = WEXITSTATUS(state); /* the shell's code of a signal, or of no command */
    if (code > SHELL_SIGNAL) return SHELL_SIGNAL - code;
    return code >= NOT_FOUND ? ML_COMMAND_NOT_STARTED : code;
}

int ml_command_run(const ml_command *c) {
    const char *words[MOST_WORDS] = {"sh", "-c", guard, "mlua"};
    int count = 4, alive[2];
    for (int i = 0; i < ML_COMMAND_FILES; i++) words[count++] = c->files[i] ? c->files[i] : "";
    words[count++] = c->temporaries ? c->temporaries : "";
    for (int i = 0; c->words[i]; i++) {
        if (count == MOST_WORDS - 1) return ML_COMMAND_NOT_STARTED;
        words[count++] = c->words[i];
    }
    words[count] = NULL;
    if (ml_command_stops() != c->stops) return -SIGTERM;
    if (pipe2(alive, O_CLOEXEC) != 0) return ML_COMMAND_NOT_STARTED;
    pid_t child = start(c, words, alive[0]);
    close(alive[0]);
    int code = ML_COMMAND_NOT_STARTED;
    if (child > 0) {
        int place = register_group(child);
        if (ml_command_stops() != c->stops) kill(-child, SIGTERM); /* it came in between */
        code = await(child, place);
    }
    close(alive[1]);
    return code;
}
