// Rounds every product before its addition, as torch does, in all code that follows.
#pragma once

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
