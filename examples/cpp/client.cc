// A Chairlift client in C++, in one page. With Debian's g++, libgrpc++-dev, libprotobuf-dev,
// protobuf-compiler-grpc and pkg-config:
//
//     ./build.sh && ./client [ADDRESS[,ADDRESS…]] ["A question"]
//
// It streams an answer, and goes on where it stopped when a router dies: at the next address, after the ids
// that it has (docs/protocol.md, "Resuming as a client").
#include <chrono>
#include <iostream>
#include <sstream>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "protos/v1/router.grpc.pb.h"

using namespace chairlift::v1;

int main(int argc, char** argv) {
  std::vector<std::unique_ptr<Router::Stub>> routers;
  std::istringstream addresses(argc > 1 ? argv[1] : "127.0.0.1:50051");
  for (std::string address; std::getline(addresses, address, ',');) {
    grpc::ChannelArguments options;
    options.SetString("grpc.default_authority", "localhost");  // the path of a socket is no legal one
    routers.push_back(Router::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options)));
  }

  GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(argc > 2 ? argv[2] : "What is the capital of France?");
  request.mutable_sampling()->set_max_tokens(48);
  request.mutable_sampling()->set_temperature(0);

  grpc::Status status;
  for (size_t attempt = 0; attempt < 20; ++attempt) {
    grpc::ClientContext call;  // call.TryCancel() would give the request up, and free what it holds
    call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    auto stream = routers[attempt % routers.size()]->Generate(&call, request);
    for (GenerateEvent event; stream->Read(&event);) {
      if (event.has_accepted()) {
        request.set_request_id(event.accepted().request_id());
        request.mutable_resume()->set_resume_token(event.accepted().resume_token());
        if (request.resume().received().empty()) request.mutable_resume()->add_received();  // of choice 0
      } else if (event.has_delta()) {
        std::cout << event.delta().text() << std::flush;
        request.mutable_resume()->mutable_received(0)->mutable_token_ids()->MergeFrom(
            {event.delta().token_ids().begin(), event.delta().token_ids().end()});
      } else if (event.has_finished()) {
        std::cout << "\n" << FinishReason_Name(event.finished().reason()) << ", "
                  << event.finished().usage().num_output_tokens() << " tokens\n";
      }
    }
    status = stream->Finish();
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(200 + 50 * attempt));
  }
  if (!status.ok()) {
    std::cerr << "failed (" << status.error_code() << "): " << status.error_message() << "\n";
    return 1;
  }

  // A refusal names field, value and limit.
  request.clear_resume();
  request.clear_request_id();
  request.mutable_sampling()->set_temperature(-1);
  grpc::ClientContext call;
  GenerateResponse response;
  status = routers[0]->Complete(&call, request, &response);
  std::cout << status.error_message() << "\n";
}
