// SPDX-License-Identifier: Apache-2.0 OR MIT
// thread-clock: a library for LD_PRELOAD under the tests. QEMU measures its key derivation for a second and more whenever it
// makes a LUKS key slot, by the processor time of a thread. Here that clock goes a hundred times as fast, so a slot takes
// hundredths of a second and gets the least number of iterations that QEMU allows. Nothing else in the tests reads that clock.
#define _GNU_SOURCE
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static const long FASTER = 100;
static const long MICROSECONDS = 1000000;

int getrusage(__rusage_who_t who, struct rusage *usage) {
  int code = syscall(SYS_getrusage, who, usage);
  if (code == 0 && who == RUSAGE_THREAD) {
    long used = (usage->ru_utime.tv_sec * MICROSECONDS + usage->ru_utime.tv_usec) * FASTER;
    usage->ru_utime.tv_sec = used / MICROSECONDS;
    usage->ru_utime.tv_usec = used % MICROSECONDS;
  }
  return code;
}
