#include "vm/cli/output.h"

#include <fcntl.h>
#include <unistd.h>

static bool complain(void) {
    fprintf(stderr, "mlua: cannot write to standard output\n");
    return false;
}

bool output_divert(vm_options *options) {
    options->json_out = stdout;
    bool first =
        !options->comm || ml_comm_rank(options->comm) == 0; /* of others nothing is shown */
    if (!options->json || !first) return true;
    fflush(stdout);
    int out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    options->json_out = out < 0 ? NULL : fdopen(out, "w");
    if (!options->json_out || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return complain();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* in order with what is written to standard error */
    return true;
}

bool output_restore(vm_options *options) {
    FILE *out = options->json_out;
    options->json_out = stdout;
    if (out == stdout || !out) return true;
    fflush(stdout);
    dup2(fileno(out), STDOUT_FILENO);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    return !failed || complain();
}

/* The descriptor of standard output changes, so that io.write and other processes are silent too.
 */
void output_discard(ml_vm *vm, bool discard) {
    if (discard == vm->discards) return;
    fflush(stdout);
    if (discard) {
        int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
        vm->shown = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        if (nowhere >= 0 && vm->shown >= 0) dup2(nowhere, STDOUT_FILENO);
        if (nowhere >= 0) close(nowhere);
    } else if (vm->shown >= 0) {
        dup2(vm->shown, STDOUT_FILENO);
        close(vm->shown);
    }
    vm->discards = discard;
}
