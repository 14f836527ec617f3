"""Faults, and where each is tried. `real` is the CPU engine, the others are stand-ins on real storages.

engine killed at load, at warm-up, in a load, among the questions   test_engine_faults
engine killed in a request, in a measurement; resume                test_real_engine
engine that hangs at start                                          test_engine_faults
engine that hangs at shutdown                                       test_commands_end, test_engine_faults
metrics that never answer, a page of garbage                        test_engine_faults
200 with an error in its body                                       test_engine_faults
out of memory under load                                            test_engine_faults
port taken between check and start                                  test_engine_faults
disk full under results, storage, engine and stdout                 test_storage_faults
storage locked, cut off, damaged before and while a sweep runs      test_storage_faults
a killed writer's half line; a living writer's half line            test_storage_faults
a clock that steps                                                  test_storage_faults
SIGINT, SIGTERM, SIGHUP, SIGKILL of serve; two signals              test_commands_end
SIGINT, SIGTERM, SIGHUP of a sweep; SIGKILL at random moments       test_commands_end, bench/kill9.py
two sweeps in one folder                                            test_commands_end
a log of ten gigabytes                                              test_real_engine, tests/unit/test_log.py
"""
