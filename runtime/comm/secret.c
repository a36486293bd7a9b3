/* What the ranks of a job know and strangers do not: MLUA_SECRET, or else a file that only the user
 * can read, created when it is first needed. Every host of a cluster sees it in the shared home. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/comm/join_internal.h"

enum { SECRET_DIGITS = 64, PATH_BYTES = 2048 };

static ml_status read_secret(const char *path, char secret[65 + 256]) {
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return ml_fail(ML_IO, "cannot read %s: %s", path, strerror(errno));
    bool safe = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
                (about.st_mode & 077) == 0;
    ssize_t size = safe ? read(fd, secret, SECRET_DIGITS) : 0;
    close(fd);
    if (!safe) {
        ml_fail(ML_INVALID, "%s, which holds the secret of this user's jobs, is not private", path);
        return ml_help("remove it (a new one is created), or set MLUA_SECRET");
    }
    secret[size > 0 ? size : 0] = 0;
    if (size == SECRET_DIGITS && strspn(secret, "0123456789abcdef") == SECRET_DIGITS) return ML_OK;
    ml_fail(ML_INVALID, "%s holds no secret of %d hexadecimal digits", path, SECRET_DIGITS);
    return ml_help("remove it: a new one is created");
}

/* Ranks may come here at the same moment: each writes a file of its own, one of them gets the name.
 */
static void make_secret(const char *path) {
    char text[SECRET_DIGITS + 1], suffix[13], own[PATH_BYTES + sizeof suffix];
    join_random_hex(text, SECRET_DIGITS);
    text[SECRET_DIGITS] = '\n';
    join_random_hex(suffix, sizeof suffix - 1);
    snprintf(own, sizeof own, "%s.%s", path, suffix);
    int fd = open(own, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return;
    bool good = write(fd, text, SECRET_DIGITS + 1) == SECRET_DIGITS + 1 && fsync(fd) == 0;
    close(fd);
    if (good && link(own, path) != 0 && errno != EEXIST) good = false;
    unlink(own);
}

ml_status comm_secret(const ml_launch *launch, char secret[65 + 256]) {
    const char *given = *launch->secret ? launch->secret : launch->options.secret;
    if (given && *given) {
        snprintf(secret, 65 + 256, "%s", given);
        return ML_OK;
    }
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    char path[PATH_BYTES];
    if (config && *config)
        snprintf(path, sizeof path - 16, "%s", config);
    else if (home && *home)
        snprintf(path, sizeof path - 16, "%s/.config", home);
    else
        return ml_fail(ML_INVALID, "the ranks have no secret in common: set MLUA_SECRET, or HOME");
    mkdir(path, 0700);
    strcat(path, "/mlua");
    mkdir(path, 0700);
    strcat(path, "/secret");
    if (access(path, F_OK) != 0) make_secret(path);
    return read_secret(path, secret);
}
