/* Commands that this process waits for, compilers above all. A command and all that it starts are a
 * process group of their own, beside which a shell waits for the end of this process: however that
 * comes, SIGKILL included, the group is ended within about a second and its temporary files are
 * removed. */
#ifndef ML_COMMAND_H
#define ML_COMMAND_H

#include <stdbool.h>

enum { ML_COMMAND_NOT_STARTED = -1000, ML_COMMAND_FILES = 3 };

typedef struct {
    const char *const *words;            /* the command's path and arguments, NULL at the end */
    const char *out, *errors;            /* files to which its output is written */
    const char *files[ML_COMMAND_FILES]; /* removed where this process dies; NULL: none */
    const char *temporaries; /* folder for its own temporary files (TMPDIR), removed likewise; NULL:
                                the usual one */
    unsigned stops; /* ml_command_stops() when it was decided upon: none starts after a stop */
} ml_command;

/* The exit code, minus the signal that ended it, or ML_COMMAND_NOT_STARTED. From any thread. */
int ml_command_run(const ml_command *command);
/* End all commands that run, by SIGTERM; for signal handlers. */
void ml_command_stop(void);
unsigned ml_command_stops(void); /* how often that was called */

#endif
