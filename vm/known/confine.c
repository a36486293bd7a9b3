/* Limits of a process that traces a script which was opened in an editor. */
#define _GNU_SOURCE
#include "vm/known/known.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SECONDS = 5, PLAN_SECONDS = 10 }; /* of processor time */
static const rlim_t MEMORY = (rlim_t)2 << 30;

/* `beyond`: what the hard limit is above the soft one. */
static void limit(int resource, rlim_t most, rlim_t beyond) {
    struct rlimit now;
    if (getrlimit(resource, &now) != 0) return;
    rlim_t hard = now.rlim_max < most + beyond ? now.rlim_max : most + beyond;
    setrlimit(resource, &(struct rlimit){hard < most ? hard : most, hard});
}

static void limit_resources(void) {
    limit(RLIMIT_CPU, SECONDS, PLAN_SECONDS + 1); /* first SIGXCPU, which says why it ended */
    limit(RLIMIT_CORE, 0, 0);
#ifndef __SANITIZE_ADDRESS__ /* whose shadow memory takes more addresses */
    limit(RLIMIT_AS, MEMORY, 0);
#else
    (void)MEMORY;
#endif
}

/* ---- Reading: Landlock ----------------------------------------------------------------------- */

static void allow(int rules, const char *path, size_t length, uint64_t access) {
    char name[4096];
    if (length == 0 || length >= sizeof name) return;
    memcpy(name, path, length);
    name[length] = 0;
    int file = open(name, O_PATH | O_CLOEXEC);
    if (file < 0) return;
    struct landlock_path_beneath_attr rule = {.allowed_access = access, .parent_fd = file};
    syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
    close(file);
}

/* Only files below these folders, and those of libraries and of the machine's description. */
static bool limit_reading(const char *folders) {
    static const char *const system_paths[] = {
        "/usr",          "/lib",          "/lib64",        "/etc/ld.so.cache",
        "/proc/self",    "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system",
        "/sys/fs/cgroup"};
    const uint64_t file = LANDLOCK_ACCESS_FS_READ_FILE, all = file | LANDLOCK_ACCESS_FS_READ_DIR;
    struct landlock_ruleset_attr handled = {.handled_access_fs = all | LANDLOCK_ACCESS_FS_EXECUTE};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
    if (rules < 0) return false;
    for (size_t i = 0; i < sizeof system_paths / sizeof *system_paths; i++) {
        const char *path = system_paths[i];
        bool is_file = strncmp(path, "/etc", 4) == 0 || strcmp(path, "/proc/cpuinfo") == 0 ||
                       strcmp(path, "/proc/meminfo") == 0;
        allow(rules, path, strlen(path), is_file ? file : all);
    }
    for (const char *at = folders; *at; at += *at == ':') {
        size_t length = strcspn(at, ":");
        allow(rules, at, length, all);
        at += length;
    }
    bool done = syscall(SYS_landlock_restrict_self, rules, 0) == 0;
    close(rules);
    return done;
}

/* ---- Writing, processes, network: system calls ----------------------------------------------- */

#if defined __x86_64__
#define THIS_ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define THIS_ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

static const short refused_calls[] = {
    SYS_execve,
    SYS_execveat,
    SYS_ptrace,
    SYS_kill,
    SYS_tkill,
    SYS_socket,
    SYS_socketpair,
    SYS_connect,
    SYS_bind,
    SYS_listen,
    SYS_accept,
    SYS_accept4,
    SYS_sendto,
    SYS_sendmsg,
    SYS_renameat,
    SYS_renameat2,
    SYS_unlinkat,
    SYS_mkdirat,
    SYS_mknodat,
    SYS_linkat,
    SYS_symlinkat,
    SYS_fchmod,
    SYS_fchmodat,
    SYS_fchown,
    SYS_fchownat,
    SYS_truncate,
    SYS_utimensat,
    SYS_setxattr,
    SYS_lsetxattr,
    SYS_fsetxattr,
    SYS_removexattr,
    SYS_lremovexattr,
    SYS_fremovexattr,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_unshare,
    SYS_setns,
    SYS_bpf,
    SYS_keyctl,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_perf_event_open,
    SYS_init_module,
    SYS_finit_module,
    SYS_kexec_load,
    SYS_reboot,
    SYS_setrlimit,
#ifdef SYS_open
    SYS_fork,
    SYS_vfork,
    SYS_creat,
    SYS_rename,
    SYS_unlink,
    SYS_mkdir,
    SYS_rmdir,
    SYS_mknod,
    SYS_link,
    SYS_symlink,
    SYS_chmod,
    SYS_chown,
    SYS_lchown,
    SYS_utime,
    SYS_utimes,
#endif
};
/* Those of which older ones are known; callers fall back to them. */
static const short unknown_calls[] = {SYS_clone3, SYS_io_uring_setup,
#ifdef SYS_openat2
                                      SYS_openat2
#endif
};

enum { PROGRAM = 256 };
typedef struct {
    struct sock_filter at[PROGRAM];
    unsigned short count;
} program;

static void add(program *p, unsigned short code, uint32_t k, unsigned char yes, unsigned char no) {
    p->at[p->count++] = (struct sock_filter){code, yes, no, k};
}

static void load(program *p, size_t offset) {
    add(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static void refuse(program *p, int error) {
    add(p, BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error, 0, 0);
}

/* Of `call`, whose argument i has one of these bits: EACCES. The number stays loaded. */
static void refuse_flags(program *p, long call, int i, uint32_t bits) {
    add(p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 4);
    load(p, offsetof(struct seccomp_data, args) + (size_t)i * sizeof(uint64_t));
    add(p, BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1);
    refuse(p, EACCES);
    load(p, offsetof(struct seccomp_data, nr));
}

static bool limit_calls(void) {
#ifdef THIS_ARCHITECTURE
    program p = {.count = 0};
    const uint32_t writing = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC;
    load(&p, offsetof(struct seccomp_data, arch));
    add(&p, BPF_JMP | BPF_JEQ | BPF_K, THIS_ARCHITECTURE, 1, 0);
    add(&p, BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS, 0, 0);
    load(&p, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__ /* calls of the x32 ABI have other numbers */
    add(&p, BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);
    refuse(&p, EPERM);
#endif
    for (size_t i = 0; i < sizeof refused_calls / sizeof *refused_calls; i++) {
        add(&p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)refused_calls[i], 0, 1);
        refuse(&p, EACCES);
    }
    for (size_t i = 0; i < sizeof unknown_calls / sizeof *unknown_calls; i++) {
        add(&p, BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)unknown_calls[i], 0, 1);
        refuse(&p, ENOSYS);
    }
#ifdef SYS_open
    refuse_flags(&p, SYS_open, 1, writing);
#endif
    refuse_flags(&p, SYS_openat, 2, writing);
    /* A clone is a thread. */
    add(&p, BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4);
    load(&p, offsetof(struct seccomp_data, args));
    add(&p, BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0);
    refuse(&p, EACCES);
    load(&p, offsetof(struct seccomp_data, nr));
    add(&p, BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
    struct sock_fprog whole = {p.count, p.at};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole) == 0;
#else
    return false;
#endif
}

static bool is_confined;
#ifdef __SANITIZE_ADDRESS__
/* The leak check at exit starts a process, which is refused. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) {
    return is_confined;
}
#endif

void known_confine_plan(void) {
    if (is_confined) limit(RLIMIT_CPU, SECONDS + PLAN_SECONDS, 1);
}

const char *known_confine(const char *folders) {
    limit_resources();
    is_confined = true;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return "limits";
    bool reading = limit_reading(folders), calls = limit_calls();
    if (!calls) limit(RLIMIT_FSIZE, 0, 0), limit(RLIMIT_NPROC, 0, 0);
    return calls ? (reading ? "limits, calls, files" : "limits, calls")
                 : (reading ? "limits, files" : "limits");
}
