# The release workflow fills in URL and SHA256 and attaches the result to the release. For a tap: copy it to Formula/servd.rb.
class Servd < Formula
  desc "OpenAI-compatible serving daemon for language models"
  url "URL"
  sha256 "SHA256"
  license "Apache-2.0"

  depends_on "python@3.12"

  # pip gets torch and the other dependencies as wheels: building them takes hours.
  def install
    system "python3.12", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-compile", buildpath
    bin.install_symlink libexec/"bin/servd"
  end

  service do
    run [opt_bin/"servd", "serve"]
    keep_alive crashed: true
    log_path var/"log/servd.log"
    error_log_path var/"log/servd.log"
  end

  test do
    system libexec/"bin/python", "-c", "from servd import LLM; LLM().generate('2 + 2')"
  end
end
