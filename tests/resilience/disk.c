/* Preloaded into a server: the file DISK_FILE says how many bytes of its append-only file a sync has certainly written,
   those that it had when the sync began. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile long *disk(void) {
  static volatile long none, *mapped;
  if (!mapped) {
    const char *name = getenv("DISK_FILE");
    int file = name ? open(name, O_RDWR) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    mapped = found == MAP_FAILED ? &none : found;
  }
  return mapped;
}

static int is_log(int file) {
  static const char end[] = ".incr.aof";
  char link[64], name[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, name, sizeof name);
  return n > (ssize_t)strlen(end) && !strncmp(name + n - strlen(end), end, strlen(end));
}

static int synced(int file, long number) {
  struct stat before;
  int known = !fstat(file, &before) && is_log(file);
  int failed = syscall(number, file);
  if (known && !failed) *disk() = before.st_size;
  return failed;
}

int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }
