@echo off
rem Opens Impasto, or does what run.py is told by further words; stays open when that fails.
setlocal
set "PYTHON_COMMAND=py -3"
where /q py || set "PYTHON_COMMAND=python"
rem The Microsoft Store puts a python.exe in place that only opens the Store: it cannot tell a version.
%PYTHON_COMMAND% --version >nul 2>nul
if errorlevel 1 (
    echo Impasto needs Python 3.11 to 3.14. Install it with: winget install -e --id Python.Python.3.12
    pause
    exit /b 1
)
%PYTHON_COMMAND% "%~dp0run.py" %*
set "EXIT_CODE=%ERRORLEVEL%"
if not "%EXIT_CODE%"=="0" pause
exit /b %EXIT_CODE%
