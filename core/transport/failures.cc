#include "transport/failures.h"

namespace sparkhvd {

std::string RankNames(const std::vector<int>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    names += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return names;
}

std::string TransferName(Direction direction, int peer) {
  const char* what = direction == Direction::kSend ? "send to rank " : "receive from rank ";
  return what + std::to_string(peer);
}

Status LateTransfer(Direction direction, int peer, size_t done, size_t size, const char* known) {
  return Status(StatusCode::kTimeout, TransferName(direction, peer) + ": " + std::to_string(done) +
                                          " of " + known + std::to_string(size) +
                                          " bytes when the deadline passed");
}

Status LengthMismatch(int peer, size_t sent, size_t expected, const char* known) {
  return Status(StatusCode::kInternal, "rank " + std::to_string(peer) + " sent " +
                                           std::to_string(sent) + " bytes where " + known +
                                           std::to_string(expected) + " were expected");
}

Status PeerLost(int peer, const std::string& how) {
  return Status(StatusCode::kPeerLost, "lost rank " + std::to_string(peer) + ": " + how);
}

Status PeerAborted(int peer, const Status& why) {
  if (why.code() == StatusCode::kShutDown) return PeerLost(peer, "it left the job");
  return why.Annotate("rank " + std::to_string(peer) + " aborted");
}

Status CheckPeer(int peer, int rank, int size) {
  if (peer >= 0 && peer < size && peer != rank) return Status();
  return Status(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                  std::to_string(size) + " has no link to rank " +
                                                  std::to_string(peer) +
                                                  "; a peer is another rank of the same job");
}

}  // namespace sparkhvd
