// The error of calls between ranks.
#pragma once

#include <stdexcept>
#include <string>

namespace helicore::comm {

// A rank is missing, has died, has given up, or made another call; the message names it.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace helicore::comm
