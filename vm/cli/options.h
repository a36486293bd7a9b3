/* The options of the command line: one table, from which they are read and help is printed. */
#ifndef ML_COMMAND_OPTIONS_H
#define ML_COMMAND_OPTIONS_H

#include <signal.h>

#include "vm/vm.h"

enum {
    EXIT_OK,
    EXIT_ERROR,
    EXIT_USAGE,
    EXIT_HUNG_UP = 128 + SIGHUP,
    EXIT_INTERRUPTED = 128 + SIGINT
};

enum {
    FOR_RUN = 1,
    FOR_CHECK = 2,
    FOR_REPL = 4,
    FOR_DOCTOR = 8,
    FOR_GENERATE = 16,
    FOR_EXPORT = 32,
    FOR_SHOW = 64,
    FOR_TOKENIZE = 128,
    FOR_SERVE = 256,
    FOR_WATCH = 1 << 12,
    FOR_TUNE = 512,
    FOR_SCRIPTS = FOR_RUN | FOR_CHECK | FOR_REPL
};

typedef struct command {
    const char *name, *arguments, *doc;
    int flag; /* FOR_...; 0: no options */
    int (*run)(vm_options *options, int count, char **words);
} command;

/* Print the options of these commands, FOR_... */
void options_print(int flags);
/* Options, settings and the script of a command; the value is EXIT_OK or EXIT_USAGE. */
int options_parse(const command *c, vm_options *options, int count, char **words);
/* Of check: what belongs to other options alone, and what --serve sets; whether that is right. */
bool options_of_check(vm_options *options);
/* What tune alone must have, and may not have at once; with --serve one GPU is the default. */
int options_of_tune(vm_options *options);
/* Print "mlua: ..." on standard error; EXIT_USAGE. */
__attribute__((format(printf, 1, 2))) int usage_error(const char *format, ...);
/* "did you mean GUESS?", or another help; EXIT_USAGE. */
int print_suggestion(const char *guess, const char *otherwise);

#endif
