// The C++ client of the Hearth daemon, in one header.
#ifndef HEARTH_HEARTH_HPP
#define HEARTH_HEARTH_HPP

#include "client.hpp"

#endif
