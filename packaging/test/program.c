/* A program of the C library: opens and closes a socket of a stack that is not there. */
#include <stdio.h>
#include <tidegate.h>

int main(void)
{
    if (tg_attach("/nonexistent") == 0) {
        return 1;
    }
    printf("%s\n", tg_last_error());
    return 0;
}
