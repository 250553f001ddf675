// Starts gVisor's tests by GoogleTest alone, without Google's benchmark library.

#include <signal.h>

#include "absl/flags/parse.h"
#include "gtest/gtest.h"
#include "test/util/test_util.h"

namespace gvisor {
namespace testing {

void SetupGvisorDeathTest() {}

void TestInit(int* argc, char*** argv) {
  ::testing::InitGoogleTest(argc, *argv);
  absl::ParseCommandLine(*argc, *argv);
  signal(SIGPIPE, SIG_IGN);
}

int RunAllTests() { return RUN_ALL_TESTS(); }

}  // namespace testing
}  // namespace gvisor
