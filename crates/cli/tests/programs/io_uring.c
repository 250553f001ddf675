/* Asks the kernel for an io_uring, as programs do that make this system call themselves, and
 * prints the error and whether programs that this one executes can gain privileges. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void) {
    /* `struct io_uring_params`, which the kernel fills in. */
    unsigned char parameters[120];
    memset(parameters, 0, sizeof parameters);
    long result = syscall(SYS_io_uring_setup, 4, parameters);
    int error = result < 0 ? errno : 0;
    int gains = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0;
    printf("io_uring: %s, gains privileges: %s\n", strerror(error), gains ? "yes" : "no");
    return 0;
}
