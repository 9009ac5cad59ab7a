// For `make wheel`: takes the versions of symbols that glibc 2.28 and the libstdc++ of GCC 8 have, so that a wheel built on
// a newer system is a manylinux_2_28 one. The release workflow builds on such a system and does not need this.

#if defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
// std::condition_variable::wait
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
