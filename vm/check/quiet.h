/* Processes of this user that plan and those that time products take turns, as `mlua tune` plans
 * many layouts at once (quiet.c). */
#ifndef ML_QUIET_H
#define ML_QUIET_H

/* This process plans until it ends or times: meanwhile none times. Waits for those that time now.
 */
void quiet_plan(void);
/* It plans no longer, and times: waits until no other does either. */
void quiet_begin(void);
void quiet_end(void);

#endif
