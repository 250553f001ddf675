// The loopback addresses of gVisor's tests, replaced by those of the interface under test: loopback
// itself is always the kernel's.

#include <netinet/in.h>

#undef INADDR_LOOPBACK
#define INADDR_LOOPBACK ((in_addr_t)0xc0000202)  // 192.0.2.2
#undef IN6ADDR_LOOPBACK_INIT
#define IN6ADDR_LOOPBACK_INIT {{{0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2}}}  // 2001:db8::2
static const struct in6_addr own_in6addr = IN6ADDR_LOOPBACK_INIT;
#define in6addr_loopback own_in6addr
