/* Preloaded into a server: its wall clock is off by as many milliseconds as the file CLOCK_FILE says. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *mapped;

static long off(void) {
  if (!mapped) {
    static volatile long none;
    const char *name = getenv("CLOCK_FILE");
    int file = name ? open(name, O_RDONLY) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    mapped = found == MAP_FAILED ? &none : found;
  }
  return *mapped;
}

int clock_gettime(clockid_t which, struct timespec *t) {
  int failed = syscall(SYS_clock_gettime, which, t);
  if (!failed && which == CLOCK_REALTIME) {
    long long ns = (long long)t->tv_sec * 1000000000 + t->tv_nsec + (long long)off() * 1000000;
    t->tv_sec = ns / 1000000000;
    t->tv_nsec = ns % 1000000000;
  }
  return failed;
}

int gettimeofday(struct timeval *v, void *zone) {
  struct timespec t;
  int failed = clock_gettime(CLOCK_REALTIME, &t);
  v->tv_sec = t.tv_sec;
  v->tv_usec = t.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *seconds) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (seconds) *seconds = t.tv_sec;
  return t.tv_sec;
}
