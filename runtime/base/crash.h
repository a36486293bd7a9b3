/* What a crash leaves behind: the calls that led to it, on stderr, so that a report of the fault
 * can say more than the name of a signal. */
#ifndef ML_CRASH_H
#define ML_CRASH_H

/* From here on signals of a fault in the program (SIGSEGV, SIGBUS, SIGILL, SIGFPE,
 * SIGABRT) print them before the process ends by that very signal. Sanitizers have their own. */
void ml_crash_report(void);
/* The process is about to end, and has reported why: a thread that it leaves inside a library
 * stands still at a fault, in silence. Faults of the main thread are reported as before. */
void ml_crash_ending(void);

#endif
